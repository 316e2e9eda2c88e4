"""JSON schemas as hypothesis makes them; whatever they hold, an answer to them ends within some hundred tokens."""

from typing import Any

from hypothesis import strategies as st

TEMPERATURES = (0.0, 0.7, 1.5, 5.0)
NUMBERS, SMALL = st.integers(-50, 50), st.integers(0, 2)
LEAVES = st.one_of(
    st.builds(lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)}, NUMBERS, NUMBERS),
    st.builds(lambda a, n: {"type": "number", "minimum": a, "maximum": a + n}, NUMBERS, st.integers(1, 9)),
    st.builds(lambda a, n: {"type": "string", "minLength": a, "maxLength": a + 2 * n}, SMALL, SMALL),
    st.sampled_from([
        {"type": "string", "pattern": "^[a-z]{1,4}-[0-9]{2}$"}, {"type": "string", "format": "date"},
        {"type": "boolean"}, {"type": "null"}, {"const": {"a": [1, "x"]}}, {"$ref": "#/$defs/tag"},
        {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9, "multipleOf": 2},
    ]),
    st.lists(st.sampled_from(["a", 'b"\n', "ü", 1, 2.5, None, True]), min_size=1, unique_by=repr).map(
        lambda values: {"enum": values}
    ),
)  # fmt: skip
NAMES = st.lists(st.sampled_from(["a", "b c", "ключ", 'q"']), min_size=1, max_size=3, unique=True)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def made(names: list[str], values: list[Any], needed: int) -> dict[str, Any]:
        properties = dict(zip(names, values, strict=False))
        return {"type": "object", "properties": properties, "required": list(properties)[:needed],
                "additionalProperties": False}  # fmt: skip

    return st.builds(made, NAMES, st.lists(inner, min_size=1, max_size=3), st.integers(0, 3))


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        st.builds(lambda a, n: {"type": "array", "items": a, "minItems": n, "maxItems": n + 2}, inner, SMALL),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
    ),
    max_leaves=5,
)
WHOLE = SCHEMAS.map(lambda schema: {**schema, "$defs": {"tag": {"enum": ["x", "y"]}}})
