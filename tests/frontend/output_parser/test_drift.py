"""Calls in other forms than the format's are found, however they are cut, and other code and JSON stays text."""

import json
from dataclasses import replace

import pytest

from frontend.output_parser.drift import drift_forms, names_within
from frontend.output_parser.events import CallArguments, CallEnd, CallStart, ReasoningText, Text
from frontend.output_parser.model_format import Reasoning, ToolFormat
from frontend.output_parser.parser import ContinuedParser, ParsedOutput, output_parser
from frontend.output_parser.tool_syntax import SYNTAX
from tests.frontend.output_parser.drifting import ARGUMENTS, CALL, FORMATS, Drifted, drifted, drifting
from tests.frontend.output_parser.examples import EXAMPLES, config
from tests.frontend.output_parser.joining import check_order, events_of
from tests.frontend.output_parser.ordinary import ordinary_answers

CASES = [(one, case) for one in FORMATS for case in drifted(one)]
IDS = [f"{one}-{case.form}" for one, case in CASES]


@pytest.mark.parametrize(("tool_format", "case"), CASES, ids=IDS)
def test_form_is_a_call_whole_and_in_every_split(tool_format: ToolFormat, case: Drifted) -> None:
    parser_config = drifting(tool_format)
    events = events_of(parser_config, case.text)
    check_order(events)
    said = "".join(one.text for one in events if isinstance(one, Text))
    assert said == case.before + case.after
    assert [one.name for one in events if isinstance(one, CallStart)] == ["get_weather"]
    arguments = "".join(one.fragment for one in events if isinstance(one, CallArguments))
    assert json.loads(arguments) == json.loads(ARGUMENTS)
    assert events_of(parser_config, *case.text) == events
    for at in range(1, len(case.text)):
        assert events_of(parser_config, case.text[:at], case.text[at:]) == events


@pytest.mark.parametrize(("tool_format", "case"), CASES, ids=IDS)
def test_form_is_text_for_a_server_that_reads_the_formats_own_only(tool_format: ToolFormat, case: Drifted) -> None:
    parsed = ParsedOutput.parse(case.text, config(tool_format))
    is_own = tool_format is ToolFormat.LLAMA and case.form == "bare"
    assert bool(parsed.calls) == is_own and (is_own or parsed.text == case.text)


@pytest.mark.parametrize("tool_format", FORMATS)
def test_functions_that_may_not_be_called_stay_text(tool_format: ToolFormat) -> None:
    for case in drifted(tool_format):
        text = case.text.replace("get_weather", "get_wind")
        assert events_of(drifting(tool_format), *text) == [Text(text)]


def test_thousand_ordinary_answers_have_no_call() -> None:
    configs = {one: drifting(one) for one in FORMATS}
    for number, text in enumerate(ordinary_answers(1000)):
        size = number % 7 + 3
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        for tool_format in (ToolFormat.HERMES, FORMATS[number % len(FORMATS)]):
            assert events_of(configs[tool_format], *pieces) == [Text(text)]


@pytest.mark.parametrize("tool_format", [ToolFormat.HERMES, ToolFormat.PYTHONIC])
def test_code_is_held_back_only_while_it_may_become_a_call(tool_format: ToolFormat) -> None:
    pieces = {  # a piece, and the text that is shown once it has arrived
        "Look:\n": "Look:", "``": "", "`py": "\n```py", "thon\nprint": "thon\nprint", '("a")\n': '("a")', "```\n": "",
        "So": "\n```\nSo", "\n```json\n{": "", '"na': "", 'me": "get_': "", "wea": "",
        "ve": '\n```json\n{"name": "get_weave',
        'r"}\n```': 'r"}', "\n{ }": "\n```\n{ }", "\n  Bye": "\n  Bye",
    }  # fmt: skip
    parser = output_parser(drifting(tool_format))
    shown = ["".join(one.text for one in parser.feed(piece) if isinstance(one, Text)) for piece in pieces]
    assert shown == [*pieces.values()]


def test_several_calls_in_several_forms_follow_each_other() -> None:
    add = '{"name": "add", "arguments": {}}'
    for text in (
        f"```json\n{{{CALL}}}\n```\n```json\n{add}\n```", f"```json\n{{{CALL}}}\n{add}\n```", f"{{{CALL}}}\n{add}",
        f"<tools>{{{CALL}}}</tools>\n<tools>{add}</tools>", f"{{{CALL}}}\n\n```json\n{add}\n```\n",
        f"<tool_call>\n{{{CALL}}}\n</tool_call>\n{add}", f"{{{CALL}}}\n<tool_call>\n{add}\n</tool_call>",
    ):  # fmt: skip
        parsed = [events_of(drifting(ToolFormat.HERMES), *pieces) for pieces in ((text,), text)]
        assert parsed[0] == parsed[1]
        assert [one.name for one in parsed[0] if isinstance(one, CallStart)] == ["get_weather", "add"]
        assert not any(isinstance(one, Text) for one in parsed[0]), parsed[0]


def test_block_of_code_after_a_call_keeps_its_fence() -> None:
    events = events_of(drifting(ToolFormat.HERMES), f"```json\n{{{CALL}}}\n```python\nx = 1\n```")
    assert events[-1] == Text("\n```python\nx = 1\n```")


def test_arguments_that_are_no_json_become_text() -> None:
    parsed = ParsedOutput.parse('```json\n{"name": "add", "arguments": {1}}\n```', drifting(ToolFormat.HERMES))
    assert not parsed.parser.called and parsed.text == "1}}\n```"


def test_cut_off_beginning_is_text() -> None:
    for text in ("```js", '```json\n{"name": "get_weather"', '{"name": "add", "argu', "<function=add"):
        assert events_of(drifting(ToolFormat.HERMES), *text) == [Text(text)]


INLINE = [one for one in EXAMPLES if one in FORMATS and SYNTAX[one].inline]


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("tool_format", INLINE)
def test_call_within_reasoning_ends_it(tool_format: ToolFormat, special: bool) -> None:
    call = EXAMPLES[tool_format]
    parser_config = drifting(tool_format, Reasoning.UNDECIDED)
    if not special and not all(map(names_within, SYNTAX[tool_format].heads)):
        thought = f"I look.\n{call}"
        assert events_of(parser_config, f"<think>\n{thought}\n</think>") == [ReasoningText(thought)]
        return
    if special:
        parser_config = replace(parser_config, shown=frozenset({SYNTAX[tool_format].tag}))
    for text in (f"<think>\nI look.\n{call}", f"<think>\nI look.\n\n{call}\n</think>\n\n", f"<think>{call}</think>"):
        events = events_of(parser_config, text)
        check_order(events)
        assert [one for one in events if isinstance(one, ReasoningText)] == [ReasoningText("I look.")][: "look" in text]
        assert [one.name for one in events if isinstance(one, CallStart)] == ["get_weather", "add"]
        assert not any(isinstance(one, Text) for one in events)
        assert events_of(parser_config, *text) == events
        for at in range(1, len(text)):
            assert events_of(parser_config, text[:at], text[at:]) == events


def test_reasoning_that_is_part_of_the_text_ends_with_a_call_too() -> None:
    call = EXAMPLES[ToolFormat.HERMES]
    parser_config = replace(drifting(ToolFormat.HERMES, Reasoning.UNDECIDED), reasoning_is_text=True)
    text = f"<think>\nI look.\n{call}\n</think>\n"
    events = events_of(parser_config, text)
    assert events[0] == Text("<think>\nI look.")
    assert [one.name for one in events if isinstance(one, CallStart)] == ["get_weather", "add"]
    assert not any(isinstance(one, Text) for one in events[1:])
    for at in range(1, len(text)):
        assert events_of(parser_config, text[:at], text[at:]) == events
    for other in (
        "<think>\nHm.\n</think>\n\nHi.",
        "<think>\nI write <tool_call> here.\n</think>Hi",
        "<think>\nCut <tool",
    ):
        for at in range(1, len(other)):
            assert events_of(parser_config, other[:at], other[at:]) == [Text(other)]


def test_reasoning_that_names_the_tags_stays_reasoning() -> None:
    for thought in ("I use <tool_call> now", "As:\n<tool_call>\n{x}", '<tool_call>{"name": "other", "arguments": {}}',
                    f"```json\n{{{CALL}}}\n```", f'Write <tool_call>{{{CALL}}}'):  # fmt: skip
        text = f"<think>\n{thought}\n</think>\n\nHi."
        for pieces in ((text,), text):
            events = events_of(drifting(ToolFormat.HERMES, Reasoning.UNDECIDED), *pieces)
            assert events == [ReasoningText(thought), Text("Hi.")]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_continued_output_has_the_same_calls(tool_format: ToolFormat) -> None:
    for case in drifted(tool_format)[::3]:
        whole = events_of(drifting(tool_format), case.text)
        names = [one.name for one in whole if isinstance(one, CallStart)]
        for at in range(1, len(case.text), 7):
            parser = ContinuedParser(output_parser(drifting(tool_format)), [case.text[:at]])
            events = [*parser.feed(case.text[at:]), *parser.finish()]
            earlier = output_parser(drifting(tool_format))
            ended = any(isinstance(one, CallEnd) for one in earlier.feed(case.text[:at]))
            assert [one.name for one in events if isinstance(one, CallStart)] == ([] if ended else names)


def test_every_format_has_its_forms() -> None:
    assert all(drift_forms(one) for one in FORMATS)
    assert not drift_forms(ToolFormat.HARMONY) and not drift_forms(ToolFormat.MISTRAL_ARGS)
