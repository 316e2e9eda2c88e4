"""Calls of newer Mistral models are parsed, however they are cut into pieces, and enforced by a grammar."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from frontend.errors import Unprocessable
from frontend.output_parser.events import CallArguments, CallStart, Event, ReasoningText, Text
from frontend.output_parser.harmony import AnswerText
from frontend.output_parser.model_format import (
    BLANK,
    MISTRAL_ARGS,
    Function,
    Mode,
    ParserConfig,
    Reasoning,
    ToolChoice,
    ToolFormat,
    spelled,
)
from frontend.output_parser.parser import output_parser
from frontend.structured_output import grammar as grammar_builder
from frontend.structured_output.tool_grammar import output_grammar
from frontend.text.tokenizer import Tokenizer
from tests.frontend.output_parser.joining import NAMES, called, cut, events_of
from tests.frontend.text.tokenizers import byte_level, save

CONFIG = ParserConfig(Reasoning.UNDECIDED, ToolFormat.MISTRAL_ARGS, NAMES)


def marked(text: str) -> str:
    for spelling, mark in MISTRAL_ARGS.items():
        text = text.replace(spelling, mark)
    return text


CASES: dict[str, tuple[str, list[Event]]] = {
    "text": (" Hi\n", [Text(" Hi\n")]),
    "a call": ('[TOOL_CALLS]add[ARGS]{"a": "]"}', called(0, "add", '{"a": "]"}')),
    "a thought, text, calls": (
        "[THINK]Hm.[/THINK]I look.[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS] {}",
        [ReasoningText("Hm."), Text("I look."), *called(0, "add", "{}"), *called(1, "get_weather", "{}")],
    ),
    "text after a call": ("[TOOL_CALLS]add[ARGS]{}\n\n done", [*called(0, "add", "{}"), Text("done")]),
    "an unknown function": ('[TOOL_CALLS]sub[ARGS]{"a": 1}', [Text('sub {"a": 1}')]),
    "arguments that are none": ("[TOOL_CALLS]add[ARGS]null", [Text("add null")]),
    "arguments that break": ("[TOOL_CALLS]add[ARGS]{a}", [CallStart(0, "add"), CallArguments(0, "{"), Text("a}")]),
    "no arguments mark": ("[TOOL_CALLS]add {}[TOOL_CALLS]add[ARGS]{}", [Text("add {}"), *called(0, "add", "{}")]),
    "a thought without end": ("[THINK]a[TOOL_CALLS]add[ARGS]{}", [ReasoningText("a"), *called(0, "add", "{}")]),
    "stray marks": ("a[ARGS]b[/THINK]c[CALL_ID]", [Text("abc")]),
    "cut off in a number": ('[TOOL_CALLS]add[ARGS]{"a": 12', [CallStart(0, "add"), CallArguments(0, '{"a": 12')]),
    "cut off in a name": ("a[TOOL_CALLS]ad", [Text("a")]),
}


@pytest.mark.parametrize(("text", "events"), CASES.values(), ids=CASES)
def test_events_of_marked_calls_do_not_depend_on_their_cuts(text: str, events: list[Event]) -> None:
    text = marked(text)
    assert events_of(CONFIG, text) == events_of(CONFIG, *text) == events
    for at in range(1, len(text)):
        assert events_of(CONFIG, text[:at], text[at:]) == events


def test_thought_that_the_prompt_opened_or_that_stays_in_the_text() -> None:
    text = marked("Hm.[/THINK]Hi")
    thinking = ParserConfig(Reasoning.OPEN, ToolFormat.MISTRAL_ARGS)
    assert events_of(thinking, text) == [ReasoningText("Hm."), Text("Hi")]
    assert output_parser(thinking).reasoning is Reasoning.OPEN
    plain = ParserConfig(Reasoning.UNDECIDED, ToolFormat.MISTRAL_ARGS, reasoning_is_text=True)
    assert events_of(plain, marked("[THINK]") + text) == [Text("Hm.Hi")]
    assert AnswerText(thinking)(text).replace(BLANK, "") == "Hi"
    assert AnswerText(CONFIG)(marked("a[THINK]b[/THINK]c[TOOL_CALLS]add[ARGS]{}")).replace(BLANK, "") == "ac"


TEXTS = st.lists(
    st.sampled_from([*MISTRAL_ARGS, "add", "sub", "{}", "{", "}", '{"a": 1}', " ", "\n", "Hi", "1"]), max_size=12
).map("".join).map(marked)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.lists(st.integers(1, 5), max_size=20))
def test_random_marks_have_the_same_events_in_any_pieces(text: str, sizes: list[int]) -> None:
    pieces = cut(text, sizes)
    whole = events_of(CONFIG, text)
    assert events_of(CONFIG, *pieces) == whole == events_of(CONFIG, *text)
    assert spelled(str(whole)) == str(whole) and "\\udc" not in str(whole)


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTIONS = tuple(Function(name, SCHEMA, False, "tools", {}) for name in ("add", "get_weather"))
CALL, OTHER = '[TOOL_CALLS]add[ARGS]{"a": 1}', '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"a": 2}'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    engine = byte_level()
    engine.add_special_tokens([AddedToken(mark, special=True) for mark in MISTRAL_ARGS])
    return Tokenizer.load(save(engine, tmp_path_factory.mktemp("mistral"), generation_config={"eos_token_id": 265}))


def accepts(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    source = tokenizer._engine.to_str()
    matcher = LLMatcher(LLTokenizer(source, eos_token=list(tokenizer.eos_ids)), grammar, log_level=0)
    (ids,) = tokenizer.encode_now([text], False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("mode", Mode)
def test_grammar_accepts_offered_calls_only(tokenizer: Tokenizer, mode: Mode, parallel: bool) -> None:
    choice = ToolChoice(FUNCTIONS, mode, NAMES, parallel)
    ids = tokenizer.special_ids_of(MISTRAL_ARGS)
    grammar = output_grammar(choice, ToolFormat.MISTRAL_ARGS, Reasoning.UNDECIDED, specials=ids)
    for lead in ("", "[THINK]Hm.[/THINK]", "[THINK][/THINK]"):
        assert accepts(tokenizer, grammar, lead + CALL) == (mode is not Mode.NONE)
        assert accepts(tokenizer, grammar, lead + CALL + OTHER) == (mode is not Mode.NONE and parallel)
        assert accepts(tokenizer, grammar, f"{lead}Hi.{CALL}") == (mode is Mode.AUTO)
        assert accepts(tokenizer, grammar, f"{lead}Hi.") == (mode is not Mode.REQUIRED)
        for wrong in (CALL.replace("add", "sub"), CALL.replace('"a"', '"b"'), CALL.replace("[ARGS]", "")):
            assert not accepts(tokenizer, grammar, lead + wrong)


def test_grammar_of_an_answer_follows_reasoning(tokenizer: Tokenizer) -> None:
    ids = tokenizer.special_ids_of(MISTRAL_ARGS)
    answer = grammar_builder.json_schema({"type": "integer"}, "response_format")
    for begins, text in ((Reasoning.UNDECIDED, "[THINK]a[/THINK]7"), (Reasoning.OPEN, "a[/THINK]7")):
        for choice in (ToolChoice(), ToolChoice(FUNCTIONS, Mode.AUTO, NAMES)):
            grammar = output_grammar(choice, ToolFormat.MISTRAL_ARGS, begins, specials=ids, answer=answer)
            assert accepts(tokenizer, grammar, text) and not accepts(tokenizer, grammar, text + "a")
            assert accepts(tokenizer, grammar, text[:-1] + CALL) == bool(choice.functions)


def test_grammar_without_special_tokens_is_refused() -> None:
    with pytest.raises(Unprocessable, match=r"no special token \[TOOL_CALLS\]"):
        output_grammar(ToolChoice(FUNCTIONS, Mode.AUTO, NAMES), ToolFormat.MISTRAL_ARGS, Reasoning.DONE)
