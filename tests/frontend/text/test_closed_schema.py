"""Which objects of a schema are closed to undeclared properties."""

from typing import Any

import pytest

from frontend.text.closed_schema import closed

NAME: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}}
SHUT = NAME | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (NAME, SHUT),
        ({"type": "object"}, {"type": "object"}),
        (NAME | {"additionalProperties": True}, NAME | {"additionalProperties": True}),
        (NAME | {"patternProperties": {"^x": NAME}}, NAME | {"patternProperties": {"^x": SHUT}}),
        (NAME | {"required": ["age"]}, NAME | {"required": ["age"]}),
        (NAME | {"minProperties": 2}, NAME | {"minProperties": 2}),
        ({"type": "array", "items": NAME}, {"type": "array", "items": SHUT}),
        ({"anyOf": [NAME, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$defs": {"a": NAME}, "$ref": "#/$defs/a"}, {"$defs": {"a": SHUT}, "$ref": "#/$defs/a"}),
        ({"allOf": [NAME]}, {"allOf": [SHUT]}),
        ({"not": NAME}, {"not": NAME}),
        ({"enum": [NAME], "default": NAME}, {"enum": [NAME], "default": NAME}),
        ({"properties": {"properties": NAME}}, {"properties": {"properties": SHUT}, "additionalProperties": False}),
    ],
)
def test_objects_with_named_properties_are_closed(given: dict[str, Any], made: dict[str, Any]) -> None:
    assert closed(given) == made


@pytest.mark.parametrize(
    "parts",
    [
        {"allOf": [NAME, {"properties": {"age": {}}}]},
        {"properties": {"of": NAME | {"anyOf": [{"properties": {"age": {}}}]}}},
        {"items": NAME | {"$ref": "#/$defs/b"}, "$defs": {"b": NAME}},
        {"allOf": 3, "anyOf": {}, "items": 7, "properties": []},
    ],
)
def test_objects_described_in_several_parts_stay_open(parts: dict[str, Any]) -> None:
    assert closed(parts) == parts
