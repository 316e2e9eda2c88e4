"""JSON Schemas in a few words for people: "integer, 1 to 128", "array of strings, at most 16".

Knows the keywords that our readers use; a schema it has no words for raises KeyError, so that none is told wrongly.
"""

import json
from collections.abc import Iterator, Mapping

from frontend.api.fields import MOST, NOTHING, SMALLEST, Field, Schema, schema

BOUNDLESS = 1e9  # beyond it a bound tells nobody anything


def words(shape: Schema) -> str:
    """What a value may be, objects only by that name; `null`, which any field that is not required may be, unsaid."""
    if shape is NOTHING:
        return "nothing"
    kinds = list(dict.fromkeys(_words(one) for one in _flat(shape)))
    return " or ".join(kinds) or "anything"


def _flat(schema: Schema) -> Iterator[Schema]:
    """The alternatives of a schema, those of alternatives too; what `allOf` adds to the first is not told."""
    if "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from _flat(one)
    elif "allOf" in schema:
        yield from _flat(schema["allOf"][0])
    elif schema.get("type") != "null" and set(schema) != {"maxItems"}:
        yield schema


def _words(schema: Schema) -> str:
    if "enum" in schema or "const" in schema:
        options = schema.get("enum", [schema.get("const")])
        return " / ".join(f"`{json.dumps(one)}`" for one in options)
    kind = schema.get("type", "anything")
    return " or ".join(_of(one, schema) for one in kind) if type(kind) is list else _of(kind, schema)


def _of(kind: str, schema: Schema) -> str:
    match kind:
        case "integer" | "number":
            return kind + _bounds(schema)
        case "array":
            most = schema.get("maxItems", MOST)
            return f"array of ({words(schema['items'])})" + (f", at most {most}" if most < 10_000 else "")
        case "object" if type(schema.get("additionalProperties")) is dict:
            return f"object of ({words(schema['additionalProperties'])})"
        case _:
            return {"string": "string", "boolean": "boolean", "object": "object", "anything": "anything"}[kind]


def _bounds(schema: Schema) -> str:
    low, high = schema.get("minimum", -MOST), schema.get("maximum", MOST)
    least = "above 0" if low == SMALLEST else f"from {low:g}" if abs(low) < BOUNDLESS else ""
    most = f"to {high:g}" if abs(high) < BOUNDLESS else ""
    return f", {least} {most}".rstrip() if least or most else ""


def inner(name: str, schema: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """Fields of the objects in a schema, with the way to them (`messages[].role`), and whether one is required."""
    for one in _flat(schema):
        if one.get("type") == "array":
            yield from inner(f"{name}[]", one["items"])
        for field, shape in one.get("properties", {}).items() if "additionalProperties" in one else ():
            yield f"{name}.{field}", shape, field in one.get("required", ())
            yield from inner(f"{name}.{field}", shape)


def merged(found: Iterator[tuple[str, Schema, bool]]) -> Mapping[str, tuple[str, bool]]:
    """By name, those of all alternatives together: words, and whether it is always required."""
    told: dict[str, tuple[list[str], bool]] = {}
    for name, shape, required in found:
        said, always = told.setdefault(name, ([], True))
        kind = words(shape)
        told[name] = said + [kind] * (kind not in said), always and required
    return {name: (" / ".join(said), always) for name, (said, always) in told.items()}


def default(field: Field) -> str:
    """As JSON; nothing where it could not be sent, or is null."""
    if field.required:
        return "required"
    told = schema({"": field})["properties"][""].get("default")
    return "" if told is None or told == () else f"`{json.dumps(told)}`"
