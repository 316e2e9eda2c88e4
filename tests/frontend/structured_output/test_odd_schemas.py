"""Keywords of a JSON schema with values that they cannot have are refused or dropped, wherever they stand."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from frontend.errors import SluiceError
from frontend.structured_output import grammar

KEYWORDS = (
    "type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
    "items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "minItems", "maxItems",
    "uniqueItems", "unevaluatedItems", "minimum", "maximum", "exclusiveMinimum", "multipleOf", "minLength", "maxLength",
    "pattern", "format", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$id", "id", "$anchor",
    "$defs", "definitions", "$dynamicRef", "$schema", "x-guidance",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    1, -1, 1e308, True, None, "x", [], [1], [[]], [None], ["a"], [{}], {}, {"a": 1}, {"a": ["b"]}, {"a": {"type": 7}},
    "#", ["object", 3], 2**70,
)  # fmt: skip
OTHERS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "prefixItems": [{"type": "string"}], "minItems": 1},
)


def places(odd: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields schemas that have this one somewhere, each read by other code."""
    for other in OTHERS:
        yield {"oneOf": [odd, other]}
        yield {**other, "not": odd}
        yield {"allOf": [odd, other], "unevaluatedProperties": False, "unevaluatedItems": False}
        yield {"if": odd, "then": other}
    yield {"type": "object", "properties": {"a": odd}, "propertyNames": odd}
    yield {"$ref": "#/$defs/a", "$defs": {"a": odd}}


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_odd_values_have_no_other_error_than_a_refusal(keyword: str) -> None:
    for value in ODD:
        for schema in places({keyword: value}):
            with suppress(SluiceError):
                grammar.json_schema(schema, "x", lenient=False)
