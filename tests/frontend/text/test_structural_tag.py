"""Structural tags: texts that their grammars accept and reject."""

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from frontend.errors import Unprocessable
from frontend.structured_output.constraints import structural_tag

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OLDER = {"structures": [{"begin": "<function=get>", "schema": CITY, "end": "</function>"}], "triggers": ["<function="]}
TAG = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": CITY}, "end": "</a>"}
OTHER = {"type": "tag", "begin": "<b>", "content": {"type": "any_text"}, "end": "</b>"}
NUMBER = {"type": "sequence", "elements": [{"type": "const_string", "value": "No. "},
                                           {"type": "regex", "pattern": "[0-9]+"}]}  # fmt: skip
NOTHING = {"type": "regex", "pattern": r"a[^\s\S]"}  # matches no text
EITHER = {"type": "or", "elements": [TAG, {"type": "const_string", "value": "none"}]}
CALL = '<function=get>{"city": "Paris"}</function>'
A, B = '<a>{"city":"x"}</a>', "<b>any < thing</b>"


def accepts(description: Any, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), structural_tag(description, "x"))
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


def triggered(**more: Any) -> dict[str, Any]:
    return {"format": {"type": "triggered_tags", "triggers": ["<a", "<b>"], "tags": [TAG, OTHER], **more}}


def separated(**more: Any) -> dict[str, Any]:
    return {"format": {"type": "tags_with_separator", "tags": [TAG, OTHER], "separator": ", ", **more}}


@pytest.mark.parametrize("description", [OLDER, '{"structures": [{"begin": "<function=get>", "schema": true, "end": '
                                         '"</function>"}], "triggers": ["<function="]}'])  # fmt: skip
def test_older_form_is_free_text_with_calls(description: Any) -> None:
    assert all(accepts(description, text) for text in ("", "Free text.\n", CALL, f"I look. {CALL} and {CALL}."))
    assert not accepts(description, "I look. <function=put>{}</function>")
    assert not accepts(description, "I look. <function=")


def test_older_form_keeps_to_its_schema() -> None:
    assert not accepts(OLDER, "<function=get>{}</function>")


@pytest.mark.parametrize(("description", "good", "bad"), [
    (triggered(), ["", "text", f"x{A}y{B}z"], ["<a>1</a>", "<b>", "<ax"]),
    (triggered(at_least_one=True), [A, f"x{B}y"], ["", "text"]),
    (triggered(stop_after_first=True), ["text", f"x{A}"], [f"{A}y", A + B]),
    (separated(), ["", A, f"{A}, {B}"], [A + B, "text", f"{A}, "]),
    (separated(at_least_one=True, stop_after_first=True), [A, B], ["", f"{A}, {B}"]),
    ({"format": NUMBER}, ["No. 12"], ["No. ", "12"]),
    ({"format": EITHER}, [A, "none"], ["", "nonea"]),
    ({"format": {"type": "any_text"}}, ["", "anything\n"], []),
])  # fmt: skip
def test_format_accepts_what_it_describes(description: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(description, text)] == []
    assert [text for text in bad if accepts(description, text)] == []


def nested(depth: int) -> dict[str, Any]:
    return {"type": "sequence", "elements": [nested(depth - 1)]} if depth else {"type": "any_text"}


@pytest.mark.parametrize(("description", "reason"), [
    ("{", "not JSON"), ("[]", "an object"), ({}, "neither"), ({"format": {"type": "poem"}}, "poem"),
    ({"format": 1}, "an object"), ({"format": nested(99)}, "nested"), (OLDER | {"triggers": ["<x"]}, "no tag begins"),
    (OLDER | {"triggers": []}, "lacks a field"), (OLDER | {"triggers": [1]}, "triggers are texts"),
    ({"structures": [{"begin": "<x>"}], "triggers": ["<x"]}, "a tag has"),
    ({"format": {"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG, OTHER]}}, "every tag"),
    ({"format": {"type": "json_schema", "json_schema": {"enum": []}}}, "`x.format.json_schema.enum` cannot"),
    (OLDER | {"structures": [OLDER["structures"][0] | {"schema": {"enum": []}}]}, "`x.structures.0..schema.enum` c"),
    ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, NOTHING]}}, "`x.format.elements.1..pattern` c"),
    ({"format": TAG | {"content": NOTHING}}, "`x.format.content.pattern` cannot be enforced: it allows no text"),
    (triggered(tags=[OTHER, TAG | {"content": NOTHING}]), "`x.format.tags.1..content.pattern` cannot"),
])  # fmt: skip
def test_description_that_cannot_be_enforced_is_refused(description: Any, reason: str) -> None:
    with pytest.raises(Unprocessable, match=reason) as refused:
        structural_tag(description, "x")
    assert f"`{refused.value.param}`" in refused.value.message and refused.value.code == "invalid_grammar"
