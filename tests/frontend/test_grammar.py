"""What an answer must look like: the fields that say so, the grammars they become, and every refusal."""

import sys
from collections.abc import Callable
from subprocess import run
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from frontend.api.anthropic import messages
from frontend.api.openai import chat, completions
from frontend.errors import SluiceError
from frontend.text import grammar_builder as build
from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL, context
from tests.frontend.api.harness import parse
from tests.patience import PATIENCE_S

BYTES = LLTokenizer("byte")
HELLO = [{"role": "user", "content": "hi"}]
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
ADA = '{"name": "Ada", "age": 36}'


def accepts(made: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, made, log_level=0)
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("made", "yes", "no"),
    [
        (
            build.json_object(),
            ["{}", '{"a": [1, 2.5e3, null]}', '{"a":{"b":"ü"}}'],
            ["[]", "{", " {}", "{} "],
        ),
        (build.json_schema(PERSON, "x"), [ADA], ["{}", '{"name":"Ada"}', ADA[:-1] + ',"b":1}']),
        (build.json_schema(True, "x"), ["1", "[]"], [""]),
        (build.regex(r"[a/]+\d/?", "x"), ["a/5", "/1/"], ["a", "a5x"]),
        (build.regex(r"(?i)^yes$|^no$", "x"), ["YES", "no"], ["yesno"]),
        (build.regex("", "x"), [""], ["a"]),
        (build.one_of(['a"b', "ü\n", "/x/", "\x01\\"], "x"), ['a"b', "ü\n", "/x/", "\x01\\"], ["a", ""]),
        (build.lark('start: "a" B\nB: /[0-9]+/', "x"), ["a1"], ["a"]),
        (build.lark('root ::= "a" [0-9]+ | "b"', "x"), ["a12", "b"], ["ab"]),
    ],
    ids=["object", "schema", "any", "regex", "flags", "empty", "choice", "lark", "gbnf"],
)
def test_a_grammar_takes_what_it_says(made: str, yes: list[str], no: list[str]) -> None:
    assert [text for text in yes if not accepts(made, text)] == []
    assert [text for text in no if accepts(made, text)] == []


def test_white_space_is_what_models_write_and_has_an_end() -> None:
    made = build.json_schema(PERSON, "x")
    assert accepts(made, '{"name":"Ada","age":36}') and accepts(made, '{\n  "name": "Ada",\n  "age": 36\n}')
    assert accepts(made, '{\n\t\t"name" : "Ada" , "age": 36 }')
    assert not accepts(made, '{"name":  "Ada", "age": 36}') and not accepts(made, ADA.replace(" ", "\n\n"))
    assert not accepts(made, ADA.replace(", ", ",\n" + " " * 25))


def test_nothing_is_invented_after_the_last_property() -> None:
    made = build.json_schema({"type": "object", "properties": {"name": {"type": "string"}}}, "x")
    assert accepts(made, '{"name": "Ada"}') and accepts(made, "{}")
    assert not accepts(made, ADA)


def test_a_schema_cannot_change_the_rules() -> None:
    lenient = {**PERSON, "x-guidance": {"lenient": True, "whitespace_pattern": "x*"}}
    assert build.json_schema(lenient, "x") == build.json_schema(PERSON, "x")


REFUSED: list[tuple[Callable[[Any, str], str], Any, str]] = [
    (build.json_schema, {"type": "foo"}, "Invalid type"),
    (build.json_schema, {"not": {}}, "Unimplemented keys"),
    (
        build.json_schema,
        {"type": "object", "required": ["q"], "additionalProperties": False},
        "Unsatisfiable",
    ),
    (build.json_schema, {"$ref": "http://x.y/z"}, "http://x.y/z"),
    (build.json_schema, {"type": "string", "pattern": "(?=a)b"}, "look-around"),
    (build.json_schema, False, "Unsatisfiable"),
    (build.json_schema, {"enum": ["x" * build.MAX_BYTES]}, "larger than"),
    (build.regex, "a(", "unclosed group"),
    (build.regex, "a\\", "lone backslash"),
    (build.regex, "\ud800", "Unicode"),
    (build.one_of, [], "nothing to choose"),
    (build.one_of, ["\ud800"], "surrogates"),
    (build.lark, "start: foo", "foo"),
    (build.lark, "hello", "neither Lark nor GBNF"),
    (build.lark, "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
    (build.lark, '{"grammars": [{"regex": "a"}]}', "neither"),
]


@pytest.mark.parametrize(("make", "value", "reason"), REFUSED, ids=[reason for _, _, reason in REFUSED])
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    make: Callable[[Any, str], str], value: Any, reason: str
) -> None:
    with pytest.raises(SluiceError) as refused:
        make(value, "guided_x")
    error = refused.value
    assert (error.status, error.param, error.code) == (422, "guided_x", "invalid_grammar")
    assert "`guided_x`" in error.message and reason in error.message and len(error.message) < 1000


async def asked(tokenizer: Tokenizer, **more: Any) -> str:
    chats = await parse(chat, {"model": MODEL, "messages": HELLO, **more}, context(tokenizer))
    plain = await parse(completions, {"model": MODEL, "prompt": "hi", "max_tokens": 9, **more}, context(tokenizer))
    assert chats.sampling.grammar == plain.sampling.grammar
    return chats.sampling.grammar


SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
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
    ({"structured_outputs": {"json_object": False, "choice": ["a"]}}, build.one_of(["a"], "x")),
    ({"structured_outputs": {}, "guided_json": None, "response_format": None}, ""),
]


@pytest.mark.parametrize(("body", "wanted"), FIELDS, ids=range(len(FIELDS)))
async def test_fields_become_one_grammar(body: dict[str, Any], wanted: str, tokenizer: Tokenizer) -> None:
    assert await asked(tokenizer, **body) == wanted


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, 422, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, 400,
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}}, 422,
     "response_format.json_schema.schema"),
    ({"response_format": "json"}, 400, "response_format"),
    ({"guided_json": "{"}, 422, "guided_json"), ({"guided_json": "3"}, 422, "guided_json"),
    ({"guided_json": 3}, 400, "guided_json"), ({"guided_regex": "("}, 422, "guided_regex"),
    ({"guided_choice": []}, 422, "guided_choice"), ({"guided_choice": [1]}, 400, "guided_choice"),
    ({"guided_grammar": "x"}, 422, "guided_grammar"),
    ({"structured_outputs": {"xml": 1}}, 422, "structured_outputs.xml"),
    ({"structured_outputs": {"regex": "("}}, 422, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, 422, "structured_outputs.regex"),
    ({"guided_regex": "a", "response_format": SCHEMA_FORMAT}, 422, "guided_regex"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "param"), WRONG, ids=range(len(WRONG)))
async def test_refusals_name_their_field(body: dict[str, Any], status: int, param: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(SluiceError) as refused:
        await asked(tokenizer, **body)
    assert (refused.value.status, refused.value.param) == (status, param)


async def test_a_large_grammar_for_many_answers_is_refused(tokenizer: Tokenizer) -> None:
    body = {"model": MODEL, "prompt": ["x"] * 1000, "n": 1, "max_tokens": 1}
    with pytest.raises(SluiceError) as refused:
        await parse(completions, {**body, "guided_choice": ["x" * 20_000]}, context(tokenizer))
    assert (refused.value.status, refused.value.param) == (422, "guided_choice")


async def test_anthropic_says_it_in_output_config(tokenizer: Tokenizer) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 9}
    schema = {"format": {"type": "json_schema", "schema": PERSON}}
    request = await parse(messages, {**body, "output_config": schema}, context(tokenizer))
    assert request.sampling.grammar == build.json_schema(PERSON, "x")
    assert not (await parse(messages, {**body, "output_config": {}}, context(tokenizer))).sampling.grammar
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"effort": "extreme"}, "output_config.effort"),
        ({"format": {"type": "json_schema", "schema": {"not": {}}}}, "output_config.format.schema"),
        ({"format": {"type": "xml", "schema": {}}}, "output_config.format.type"),
    ]
    for config, param in wrong:
        with pytest.raises(SluiceError) as refused:
            await parse(messages, {**body, "output_config": config}, context(tokenizer))
        assert (refused.value.status, refused.value.param) == (422, param)


def test_the_library_is_loaded_when_it_is_needed() -> None:
    check = "import sys, frontend.api.app; print('llguidance' in sys.modules)"
    assert (
        run([sys.executable, "-c", check], capture_output=True, text=True, timeout=PATIENCE_S).stdout.strip() == "False"
    )
