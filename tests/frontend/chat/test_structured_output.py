"""The request fields that ask for structured output: the grammars they become, and every refusal."""

import sys
from subprocess import run
from typing import Any

import pytest

from frontend.api.anthropic import messages
from frontend.api.openai import chat, completions
from frontend.errors import SluiceError
from frontend.structured_output import grammar as build
from frontend.structured_output.constraints import structural_tag
from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL, context
from tests.frontend.api.harness import parse
from tests.patience import PATIENCE_S

HELLO = [{"role": "user", "content": "hi"}]


PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip


async def grammar_of(tokenizer: Tokenizer, **more: Any) -> str:
    chats = await parse(chat, {"model": MODEL, "messages": HELLO, **more}, context(tokenizer))
    plain = await parse(completions, {"model": MODEL, "prompt": "hi", "max_tokens": 9, **more}, context(tokenizer))
    assert chats.sampling.grammar == plain.sampling.grammar
    return chats.sampling.grammar


SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}


TAGGED = {"structures": [{"begin": "<f=a>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f="]}
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "text"}}, ""),
    ({"response_format": {"type": "json_object", "json_schema": None}}, build.json_object()),
    ({"response_format": SCHEMA_FORMAT}, build.json_schema(PERSON, "x")),
    ({"guided_json": PERSON}, build.json_schema(PERSON, "x")),
    ({"guided_json": '{"type": "integer"}'}, build.json_schema({"type": "integer"}, "x")),
    ({"guided_regex": "a+"}, build.regex("a+", "x")),
    ({"guided_choice": ["a", "b"]}, build.one_of(["a", "b"], "x")),
    ({"guided_grammar": 'start: "a"'}, build.lark('start: "a"', "x")),
    ({"structured_outputs": {"json": PERSON, "regex": None}}, build.json_schema(PERSON, "x")),
    ({"structured_outputs": {"json_object": True}}, build.json_object()),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}, "guided_decoding_backend": "x"},
        build.json_object(compact=True),
    ),
    (
        {
            "structured_outputs": {
                "json": PERSON,
                "disable_any_whitespace": True,
                "disable_additional_properties": False,
                "whitespace_pattern": None,
            }
        },
        build.json_schema(PERSON, "x", compact=True),
    ),
    ({"structured_outputs": {"json_object": False, "choice": ["a"]}}, build.one_of(["a"], "x")),
    ({"structured_outputs": {}, "guided_json": None, "response_format": None}, ""),
    ({"response_format": {"type": "json", "value": PERSON}}, build.json_schema(PERSON, "x")),
    ({"response_format": {"type": "regex", "value": "a+"}}, build.regex("a+", "x")),
    ({"response_format": {"type": "json_object", "schema": PERSON}}, build.json_schema(PERSON, "x")),
    ({"response_format": {"type": "json_object", "value": PERSON}}, build.json_schema(PERSON, "x")),
    ({"response_format": {"type": "json_schema", "schema": PERSON}}, build.json_schema(PERSON, "x")),
    (
        {"response_format": {"type": "json_schema", "value": {"name": "p", "schema": PERSON}}},
        build.json_schema(PERSON, "x"),
    ),
    ({"response_format": {"type": "structural_tag", **TAGGED}}, structural_tag(TAGGED, "x")),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        structural_tag({"format": {"type": "any_text"}}, "x"),
    ),
    ({"structured_outputs": {"structural_tag": TAGGED}}, structural_tag(TAGGED, "x")),
    ({"grammar": 'root ::= "a" | "b"'}, build.lark('root ::= "a" | "b"', "x")),
    ({"json_schema": PERSON}, build.json_schema(PERSON, "x")),
]


@pytest.mark.parametrize(("body", "wanted"), FIELDS, ids=range(len(FIELDS)))
async def test_structured_output_fields_become_one_grammar(
    body: dict[str, Any], wanted: str, tokenizer: Tokenizer
) -> None:
    assert await grammar_of(tokenizer, **body) == wanted


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, 422, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, 400,
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": {"type": "foo"}}}}, 422,
     "response_format.json_schema.schema.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}}, 422,
     "response_format.json_schema.schema.enum"),
    ({"response_format": "json"}, 400, "response_format"),
    ({"guided_json": "{"}, 422, "guided_json"), ({"guided_json": "3"}, 422, "guided_json"),
    ({"guided_json": 3}, 400, "guided_json"), ({"guided_regex": "("}, 422, "guided_regex"),
    ({"guided_choice": []}, 422, "guided_choice"), ({"guided_choice": [1]}, 400, "guided_choice[0]"),
    ({"guided_grammar": "x"}, 422, "guided_grammar"),
    ({"structured_outputs": {"xml": 1}}, 422, "structured_outputs.xml"),
    ({"structured_outputs": {"regex": "("}}, 422, "structured_outputs.regex"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}}, 422, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": True}}, 422,
     "structured_outputs.disable_additional_properties"),
    ({"guided_json": {}, "guided_whitespace_pattern": " ?"}, 422, "guided_whitespace_pattern"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, 422, "structured_outputs.regex"),
    ({"guided_regex": "a", "response_format": SCHEMA_FORMAT}, 422, "guided_regex"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "param"), WRONG, ids=range(len(WRONG)))
async def test_structured_output_refusal_names_its_field(
    body: dict[str, Any], status: int, param: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(SluiceError) as refused:
        await grammar_of(tokenizer, **body)
    assert (refused.value.status, refused.value.param) == (status, param)


async def test_large_grammar_for_many_choices_is_refused(tokenizer: Tokenizer) -> None:
    body = {"model": MODEL, "prompt": ["x"] * 1000, "n": 1, "max_tokens": 1}
    with pytest.raises(SluiceError) as refused:
        await parse(completions, {**body, "guided_choice": ["x" * 20_000]}, context(tokenizer))
    assert (refused.value.status, refused.value.param) == (422, "guided_choice")


async def test_anthropic_output_config_becomes_a_grammar(tokenizer: Tokenizer) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 9}
    schema = {"format": {"type": "json_schema", "schema": PERSON}}
    request = await parse(messages, {**body, "output_config": schema}, context(tokenizer))
    older = await parse(messages, {**body, "output_format": schema["format"]}, context(tokenizer))
    assert request.sampling.grammar == older.sampling.grammar == build.json_schema(PERSON, "x")
    assert not (await parse(messages, {**body, "output_config": {}}, context(tokenizer))).sampling.grammar
    with pytest.raises(SluiceError, match="one form only"):
        await parse(messages, {**body, "output_config": schema, "output_format": schema["format"]}, context(tokenizer))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"effort": "extreme"}, "output_config.effort"),
        ({"format": {"type": "json_schema", "schema": {"not": {}}}}, "output_config.format.schema.not"),
        ({"format": {"type": "xml", "schema": {}}}, "output_config.format.type"),
    ]
    for config, param in wrong:
        with pytest.raises(SluiceError) as refused:
            await parse(messages, {**body, "output_config": config}, context(tokenizer))
        assert (refused.value.status, refused.value.param) == (422, param)


def test_import_of_the_api_does_not_load_llguidance() -> None:
    check = "import sys, frontend.app; print('llguidance' in sys.modules)"
    assert (
        run([sys.executable, "-c", check], capture_output=True, text=True, timeout=PATIENCE_S).stdout.strip() == "False"
    )
