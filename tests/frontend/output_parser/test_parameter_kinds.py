"""Which parameters of a function have string values."""

import json
from typing import Any

import pytest

from frontend.output_parser.model_format import Kind, as_json, kind_of, kinds_of, resolved, types_of

ROOT: dict[str, Any] = {
    "$defs": {"N": {"type": "integer"}, "S": {"$ref": "#/$defs/T"}, "T": {"type": "string"}, "A/~": {"type": "null"},
              "Loop": {"$ref": "#/$defs/Loop"}, "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string"}, Kind.TEXT), ({}, Kind.TEXT), (True, Kind.TEXT), ({"enum": ["a", "b"]}, Kind.TEXT),
        ({"const": "a"}, Kind.TEXT), ({"$ref": "#/$defs/S"}, Kind.TEXT), ({"$ref": "#/nowhere"}, Kind.TEXT),
        ({"$ref": "#/$defs/Loop"}, Kind.TEXT), ({"type": ["string"]}, Kind.TEXT), ({"type": "integer"}, Kind.JSON),
        ({"type": ["integer", "null"]}, Kind.JSON), ({"enum": [1, 2]}, Kind.JSON), ({"const": None}, Kind.JSON),
        ({"$ref": "#/$defs/N"}, Kind.JSON), ({"$ref": "#/$defs/A~1~0"}, Kind.JSON), ({"properties": {}}, Kind.JSON),
        ({"items": {}}, Kind.JSON), ({"allOf": [{"type": "object"}]}, Kind.JSON), ({"$ref": "#/$defs/Tree"}, Kind.JSON),
        ({"type": ["string", "null"]}, Kind.EITHER), ({"anyOf": [{"type": "string"}, {"type": "null"}]}, Kind.EITHER),
        ({"oneOf": [{"$ref": "#/$defs/T"}, {"type": "number"}]}, Kind.EITHER), ({"enum": ["a", 1]}, Kind.EITHER),
    ],
)  # fmt: skip
def test_kind_follows_from_the_schema(schema: Any, kind: Kind) -> None:
    assert kind_of(schema, ROOT) is kind


def test_kinds_are_those_of_the_named_parameters() -> None:
    assert kinds_of({"properties": {"a": {"type": "string"}, "b": {"type": "array"}}}) == {
        "a": Kind.TEXT,
        "b": Kind.JSON,
    }
    assert kinds_of({}) == kinds_of({"properties": 1}) == {}
    assert types_of({"enum": [True, None]}, {}) == {"boolean", "null"} and resolved(True, {}) == {}


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("5", Kind.TEXT, "5"), (" a\n", Kind.TEXT, " a\n"), ("5", Kind.JSON, 5), (" [1, 2]\n", Kind.JSON, [1, 2]),
        ("True", Kind.JSON, True), ("None", Kind.EITHER, None), ("null", Kind.EITHER, None),
        ("nul", Kind.EITHER, "nul"),
        ("[1", Kind.JSON, "[1"), ('"a"', Kind.JSON, "a"), ('"a"', Kind.EITHER, '"a"'), ("NaN", Kind.JSON, "NaN"),
        ("[" * 100_000, Kind.JSON, "[" * 100_000), ("", Kind.JSON, ""),
    ],
)  # fmt: skip
def test_value_becomes_json(text: str, kind: Kind, value: Any) -> None:
    assert json.loads(as_json(text, kind)) == value
