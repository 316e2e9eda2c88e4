"""Which objects of a schema are closed to undeclared properties."""

from typing import Any

import pytest

from frontend.structured_output.json_schema import supported

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
        (NAME | {"minProperties": 2}, NAME),
        ({"type": "array", "items": NAME}, {"type": "array", "items": SHUT}),
        ({"anyOf": [NAME, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$defs": {"a": NAME}, "$ref": "#/$defs/a"}, {"$defs": {"d0": SHUT}, "$ref": "#/$defs/d0"}),
        ({"allOf": [NAME]}, {"allOf": [SHUT]}),
        ({"enum": [NAME], "default": NAME}, {"enum": [NAME]}),
        ({"properties": {"properties": NAME}}, {"properties": {"properties": SHUT}, "additionalProperties": False}),
    ],
)
def test_objects_with_named_properties_are_closed(given: dict[str, Any], made: dict[str, Any]) -> None:
    assert supported(given, "x", lenient=True).schema == made


@pytest.mark.parametrize(
    "parts",
    [
        {"allOf": [NAME, {"properties": {"age": True}}]},
        {"properties": {"of": NAME | {"anyOf": [{"properties": {"age": True}}]}}},
        {"items": NAME | {"$ref": "#/$defs/d0"}, "$defs": {"d0": NAME}},
    ],
)
def test_objects_described_in_several_parts_stay_open(parts: dict[str, Any]) -> None:
    assert supported(parts, "x", lenient=False).schema == parts
