"""Output text becomes reasoning, text and calls, however it is cut and whatever a model writes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.output_parser.events import CallArguments, CallStart, Event, ReasoningText, Text
from frontend.output_parser.model_format import ParserConfig, Reasoning, ToolFormat
from tests.frontend.output_parser.joining import NAMES, called, check_order, cut, events_of

HERMES = ParserConfig(tool_format=ToolFormat.HERMES, function_names=NAMES)


LLAMA = ParserConfig(tool_format=ToolFormat.LLAMA, function_names=NAMES)


MISTRAL = ParserConfig(tool_format=ToolFormat.MISTRAL, function_names=NAMES)


THINKING = ParserConfig(Reasoning.UNDECIDED, ToolFormat.HERMES, NAMES)


ARGUMENTS = '{"city": "São \\"P\\" </tool_call>", "days": [1, -2.5e3, {"x": null}], "ok": true, "e": {}, "l": []}'


CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


ADD = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


W = called(0, "get_weather", ARGUMENTS)


CASES: dict[str, tuple[ParserConfig, str, list[Event]]] = {
    "text": (HERMES, " Hello <tool> you\n", [Text(" Hello <tool> you\n")]),
    "a call": (HERMES, CALL, W),
    "text and a call": (HERMES, f"Let me see.\n\n{CALL}", [Text("Let me see."), *W]),
    "two calls": (HERMES, f"{CALL}\n{ADD}\n", [*W, *called(1, "add", "{}")]),
    "text between": (HERMES, f"{CALL}\nand\n{ADD} bye", [*W, Text("\nand"), *called(1, "add", "{}"), Text(" bye")]),
    "other blanks": (
        HERMES,
        '<tool_call>{ "name" :"add","arguments":  {"a":1}}</tool_call>',
        called(0, "add", '{"a":1}'),
    ),
    "an unknown function": (HERMES, ADD.replace("add", "sub"), [Text(ADD.replace("add", "sub"))]),
    "no call at all": (HERMES, "a <tool_call> b", [Text("a <tool_call> b")]),
    "the tag twice": (HERMES, f"a <tool_call> {ADD}", [Text("a <tool_call>"), *called(0, "add", "{}")]),
    "arguments that are none": (
        HERMES,
        ADD.replace("{}", "[1]"),
        [Text(ADD.replace("{}", "[1]"))],
    ),
    "arguments that break": (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": 1, b: 2}}</tool_call>',
        [CallStart(0, "add"), CallArguments(0, '{"a": 1, '), Text("b: 2}}</tool_call>")],
    ),
    "cut off in the head": (HERMES, 'x <tool_call>\n{"name": "ad', [Text("x")]),
    "cut off in a number": (
        HERMES,
        '<tool_call>\n{"name": "add", "arguments": {"a": 12',
        [CallStart(0, "add"), CallArguments(0, '{"a": 12')],
    ),
    "cut off in the tail": (HERMES, ADD[:-4], called(0, "add", "{}")),
    "more in the call": (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {}, "x": 1}</tool_call>',
        [*called(0, "add", "{}"), Text(', "x": 1}</tool_call>')],
    ),
    "llama": (LLAMA, '{"name": "add", "parameters": {"a": "}"}}', called(0, "add", '{"a": "}"}')),
    "llama, typed": (LLAMA, ' {"type": "function", "name": "add", "parameters": {}}', called(0, "add", "{}")),
    "llama, tagged": (LLAMA, '<|python_tag|>{"name": "add", "arguments": {}}', called(0, "add", "{}")),
    "llama, text": (LLAMA, 'Use {"name": "add", "parameters": {}}', [Text('Use {"name": "add", "parameters": {}}')]),
    "llama, JSON that is no call": (LLAMA, '{"name": "Ada"}', [Text('{"name": "Ada"}')]),
    "llama, nothing": (LLAMA, " \n", [Text(" \n")]),
    "llama, more": (LLAMA, '{"name": "add", "parameters": {}} done', [*called(0, "add", "{}"), Text(" done")]),
    "mistral": (MISTRAL, ' [{"name": "add", "arguments": {"a": "]"}}]', called(0, "add", '{"a": "]"}')),
    "mistral, tagged": (MISTRAL, '[TOOL_CALLS] [ {"name": "add", "arguments": {}} ]\n', called(0, "add", "{}")),
    "mistral, two": (
        MISTRAL,
        f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name":"add","arguments":{{}}}}]',
        [*W, *called(1, "add", "{}")],
    ),
    "mistral, text": (MISTRAL, "[1] is a call", [Text("[1] is a call")]),
    "mistral, text first": (MISTRAL, 'Use [{"name": "add", "arguments": {}}]',
                            [Text('Use [{"name": "add", "arguments": {}}]')]),
    "mistral, not closed": (MISTRAL, '[{"name": "add", "arguments": {}}', called(0, "add", "{}")),
    "mistral, more": (MISTRAL, '[{"name": "add", "arguments": {}}] done', [*called(0, "add", "{}"), Text(" done")]),
    "mistral, then an unknown function": (
        MISTRAL,
        '[{"name": "add", "arguments": {}}, {"name": "sub", "arguments": {}}]',
        [*called(0, "add", "{}"), Text(', {"name": "sub", "arguments": {}}]')],
    ),
    "a thought": (THINKING, "\n<think>\n\nHm <tool_call>\n\nyes\n</think>\n\nHi",
                  [ReasoningText("Hm <tool_call>\n\nyes"), Text("Hi")]),
    "a thought and a call": (THINKING, f"<think>I\n</think>\n\n{CALL}", [ReasoningText("I"), *W]),
    "no thought": (THINKING, "<think>\n\n</think>\n\nHi", [Text("Hi")]),
    "an endless thought": (THINKING, "<think>a </thin", [ReasoningText("a </thin")]),
    "a thought that comes late": (THINKING, "So <think>a</think>", [Text("So <think>a</think>")]),
    "nearly a thought": (THINKING, " <thin", [Text(" <thin")]),
    "begun in the prompt": (ParserConfig(Reasoning.OPEN), "\nI see\n</think>\n\n4 <tool_call>",
                            [ReasoningText("I see"), Text("4 <tool_call>")]),
}  # fmt: skip


@pytest.mark.parametrize("parser_config, text, events", CASES.values(), ids=CASES)
def test_events_of_a_text_do_not_depend_on_its_cuts(
    parser_config: ParserConfig, text: str, events: list[Event]
) -> None:
    assert events_of(parser_config, text) == events
    assert events_of(parser_config, *text) == events
    for at in range(1, len(text)):
        assert events_of(parser_config, text[:at], text[at:]) == events


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", '{"name": "add", "arguments": ', "{}", "}", "{",
    '{"name": "', 'get_weather"', ', "parameters": ', '"arguments": ', "a", '"', "\\", ":", ",", "1", "[", "]", CALL,
    "[TOOL_CALLS]", '[{"name": "add", "arguments": {}}', ', {"name": "add", "arguments": {}}',
]  # fmt: skip


TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


FORMATS = st.sampled_from([ToolFormat.HERMES, ToolFormat.LLAMA, ToolFormat.MISTRAL])


PARSER_CONFIGS = st.builds(ParserConfig, st.sampled_from(Reasoning), FORMATS, st.just(NAMES))


@settings(max_examples=60)
@given(PARSER_CONFIGS, TEXTS, st.lists(st.integers(1, 9), max_size=30))
def test_events_of_random_texts_do_not_depend_on_their_cuts(
    parser_config: ParserConfig, text: str, sizes: list[int]
) -> None:
    events = events_of(parser_config, *cut(text, sizes))
    assert events == events_of(parser_config, text)
    check_order(events)


@settings(max_examples=60)
@given(TEXTS)
def test_events_without_calls_and_reasoning_have_all_text(text: str) -> None:
    text += "!"  # so that no call is cut off before its arguments
    events = events_of(HERMES, text)
    if all(isinstance(event, Text) for event in events):
        assert "".join(event.text for event in events if isinstance(event, Text)) == text
