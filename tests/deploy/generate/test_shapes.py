"""deploy/generate/docs_api.py describes JSON Schemas in words."""

from typing import Any

import pytest

from deploy.generate.docs_api import default, inner, merged, words
from frontend.schema.base import MOST, SMALLEST

NULL = {"type": "null"}
OBJECT = {
    "type": "object",
    "properties": {"role": {"type": "string", "enum": ["user"]}, "name": {"anyOf": [{"type": "string"}, NULL]}},
    "required": ["role"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({}, "anything"),
        ({"anyOf": [{"type": "boolean"}, NULL]}, "boolean"),
        ({"type": "integer", "minimum": 1, "maximum": 128}, "integer, from 1 to 128"),
        ({"type": "integer", "minimum": 0, "maximum": MOST}, "integer, from 0"),
        ({"type": "number", "minimum": SMALLEST, "maximum": 1}, "number, above 0 to 1"),
        ({"enum": [False, "none"]}, '`false` / `"none"`'),
        ({"type": "array", "items": {"type": "string"}, "maxItems": 16}, "array of (string), at most 16"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "object of (number)"),
        ({"allOf": [OBJECT, {"required": ["name"]}]}, "object"),
    ],
)
def test_words_of_a_schema(schema: dict[str, Any], expected: str) -> None:
    assert words(schema) == expected


def test_words_of_an_unknown_keyword_raise() -> None:
    with pytest.raises(KeyError):
        words({"type": "date"})


def test_inner_fields_have_their_path_and_requirement() -> None:
    schema = {"anyOf": [{"type": "array", "items": OBJECT}, NULL]}
    assert merged(inner("messages", schema)) == {
        "messages[].role": ('`"user"`', True),
        "messages[].name": ("string", False),
    }


def test_merged_fields_of_alternatives_are_required_only_if_all_require_them() -> None:
    other = {**OBJECT, "properties": {"role": {"type": "integer"}}, "required": []}
    assert merged(inner("x", {"anyOf": [OBJECT, other]}))["x.role"] == ('`"user"` / integer', False)


def test_default_is_json_or_empty() -> None:
    assert (default({"default": False}), default({})) == ("`false`", "")
