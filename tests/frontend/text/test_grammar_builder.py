"""Grammars of every kind: accepted texts, and refusals with their reasons."""

from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from frontend.errors import SluiceError
from frontend.structured_output import grammar as build

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
def test_grammar_of_each_kind_accepts_what_it_describes(made: str, yes: list[str], no: list[str]) -> None:
    assert [text for text in yes if not accepts(made, text)] == []
    assert [text for text in no if accepts(made, text)] == []


def test_white_space_in_json_is_bounded() -> None:
    made = build.json_schema(PERSON, "x")
    assert accepts(made, '{"name":"Ada","age":36}') and accepts(made, '{\n  "name": "Ada",\n  "age": 36\n}')
    assert accepts(made, '{\n\t\t"name" : "Ada" , "age": 36 }')
    assert not accepts(made, '{"name":  "Ada", "age": 36}') and not accepts(made, ADA.replace(" ", "\n\n"))
    assert not accepts(made, ADA.replace(", ", ",\n" + " " * 25))


def test_compact_json_has_no_white_space_between_its_parts() -> None:
    made, any_object = build.json_schema(PERSON, "x", compact=True), build.json_object(compact=True)
    assert accepts(made, '{"name":"Ada  L.","age":36}') and accepts(any_object, '{"a":[1,{"b":" "}]}')
    assert not accepts(made, ADA) and not accepts(any_object, '{"a": 1}') and not accepts(any_object, '{"a":[1, 2]}')


def test_json_schema_allows_no_unnamed_properties() -> None:
    made = build.json_schema({"type": "object", "properties": {"name": {"type": "string"}}}, "x")
    assert accepts(made, '{"name": "Ada"}') and accepts(made, "{}")
    assert not accepts(made, ADA)


def test_grammar_may_name_tokens_that_bytes_lack() -> None:
    assert "<[9999]>" in build.lark("start: <[9999]> /a/", "x")


@pytest.mark.parametrize("repeated", ["/a+/", "/(aa)*/", "/[a]+/", "/a{2,}/", "/[ab]+/ & /[ac]+/", '("a")+', '"a"{1,}'])
def test_one_character_that_is_repeated_forever_is_not_looked_ahead(repeated: str) -> None:
    made = build.lark(f'start: "x" | "y" A "a"\nA: {repeated}', "x")
    matcher = LLMatcher(BYTES, made, log_level=0)
    assert matcher.try_consume_tokens(list(b"yaaaa")) == 5 and sum(matcher.compute_bitmask()) > 0


def test_grammar_is_left_as_it_is_unless_one_character_is_repeated_forever() -> None:
    for text in ("/[a-z_][0-9a-z_]*/", r'/"([^"\n]|\\.)*"/', "/(?s:.*)/", r"/\d{1,3}(,\d+)?/", '"a" "b"?'):
        assert "no_forcing" not in build.lark(f"start: A\nA: {text}", "x")


def test_terminals_that_leave_characters_out_are_accepted() -> None:
    made = build.lark('start: A | B\nA: /[^a]+/ & ~/b/\nB: "a" C\nC: /[^\\n]/\nD: "x" & "y"', "x")
    assert accepts(made, "bb") and not accepts(made, "b") and accepts(made, "ab")


def test_json_schema_cannot_set_guidance_options() -> None:
    lenient = {**PERSON, "x-guidance": {"lenient": True, "whitespace_pattern": "x*"}}
    assert build.json_schema(lenient, "x") == build.json_schema(PERSON, "x")


REFUSED: list[tuple[Callable[[Any, str], str], Any, str, str]] = [
    (build.json_schema, {"type": "foo"}, ".type", "is no type"),
    (build.json_schema, {"not": {}}, ".not", "no value"),
    (
        build.json_schema,
        {"type": "object", "required": ["q"], "additionalProperties": False},
        ".required",
        "no value",
    ),
    (build.json_schema, {"$ref": "http://x.y/z"}, ".$ref", "http://x.y/z"),
    (build.json_schema, {"type": "string", "pattern": "(?=a)b"}, ".pattern", "look-around"),
    (build.json_schema, False, "", "no value"),
    (build.json_schema, {"enum": ["x" * build.MAX_BYTES]}, "", "larger than"),
    (build.regex, "a(", "", "unclosed group"),
    (build.regex, "a\\", "", "lone backslash"),
    (build.regex, "\ud800", "", "Unicode"),
    (build.one_of, [], "", "nothing to choose"),
    (build.one_of, ["\ud800"], "", "surrogates"),
    (build.lark, "start: foo", "", "foo"),
    (build.lark, "hello", "", "neither Lark nor GBNF"),
    (build.lark, 'start: A\nA: "a" & "b"', "", "no text"),
    (build.lark, 'start: "a" | "b" B\nB: C "d"\nC: /c+/ & ~/(?s:.*)/', "", "no text matches these parts: `B`, `C`"),
    (build.lark, r'start: "a" | "b" /c[^\s\S]/', "", r"no text matches these parts: `/c[^\s\S]/`"),
    (build.lark, 'start: "a" | b-c\nb-c: "b" b-c', "", "no text of these rules ends: `b-c`"),
    (build.lark, 'start: "a" | b\nb: "b" b\nC: ~/a/', "", "no text of these rules ends: `b`"),
    (build.lark, "start: " + "(" * 5000 + '"a"' + ")" * 5000, "", "nested"),
    (build.lark, '{"grammars": [{"regex": "a"}]}', "", "neither"),
]


@pytest.mark.parametrize(("make", "value", "path", "reason"), REFUSED, ids=[reason for *_, reason in REFUSED])
def test_grammar_that_cannot_be_enforced_is_refused_with_the_reason(
    make: Callable[[Any, str], str], value: Any, path: str, reason: str
) -> None:
    with pytest.raises(SluiceError) as refused:
        make(value, "guided_x")
    error = refused.value
    assert (error.status, error.param, error.code) == (422, f"guided_x{path}", "invalid_grammar")
    assert f"`guided_x{path}`" in error.message and reason in error.message and len(error.message) < 1000
