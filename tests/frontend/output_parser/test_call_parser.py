"""Calls in every format are found, however the text is cut into pieces or cut off, and with text around them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.output_parser.events import CallArguments, CallStart, Event, ReasoningText, Text
from frontend.output_parser.json_arguments import JsonObjectScanner
from frontend.output_parser.model_format import Reasoning, ToolFormat
from frontend.output_parser.tool_syntax import SYNTAX
from tests.frontend.output_parser.examples import ARGUMENTS, EXAMPLES, SINGLE, config
from tests.frontend.output_parser.joining import check_order, cut, events_of

INLINE = [one for one in EXAMPLES if SYNTAX[one].inline]
ALL = {**EXAMPLES, **SINGLE}


def calls_of(events: list[Event]) -> list[tuple[str, str]]:
    """Returns the name and the arguments of each call."""
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case CallStart(_, name):
                calls.append((name, ""))
            case CallArguments(_, fragment):
                calls[-1] = (calls[-1][0], calls[-1][1] + fragment)
    return calls


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def test_every_format_has_an_example() -> None:
    assert set(ALL) == set(SYNTAX)


@pytest.mark.parametrize("tool_format", ALL)
def test_calls_of_a_format_do_not_depend_on_their_cuts(tool_format: ToolFormat) -> None:
    text = ALL[tool_format]
    events = events_of(config(tool_format), text)
    check_order(events)
    calls = [(name, json.loads(arguments)) for name, arguments in calls_of(events)]
    assert calls == [("get_weather", ARGUMENTS), ("add", {})][: 1 if tool_format in SINGLE else 2]
    assert not text_of(events)
    assert events_of(config(tool_format), *text) == events
    for at in range(1, len(text)):
        assert events_of(config(tool_format), text[:at], text[at:]) == events


@pytest.mark.parametrize("tool_format", INLINE)
def test_text_around_calls_and_reasoning_are_kept(tool_format: ToolFormat) -> None:
    text = f"<think>\nHm.\n</think>\n\nI look.\n{EXAMPLES[tool_format]} Done <b>."
    events = events_of(config(tool_format, Reasoning.UNDECIDED), *text)
    assert events[:2] == [ReasoningText("Hm."), Text("I look.")] and events[-1] == Text(" Done <b>.")
    assert [name for name, _ in calls_of(events)] == ["get_weather", "add"]


@pytest.mark.parametrize("must_call", [True, False])
@pytest.mark.parametrize("tool_format", ALL)
def test_call_cut_off_anywhere_leaves_the_beginning_of_its_arguments_and_no_syntax(
    tool_format: ToolFormat, must_call: bool
) -> None:
    text, syntax = ALL[tool_format], SYNTAX[tool_format]
    for at in range(1, len(text)):
        events = events_of(config(tool_format, must_call=must_call), text[:at])
        if must_call or at >= len(syntax.tag) > 0:
            assert not text_of(events), text[:at]
        for name, arguments in calls_of(events):
            assert name in ("get_weather", "add")
            scanner = JsonObjectScanner()
            scanned = scanner.feed(arguments)
            assert not scanner.broken and json.loads(scanned if scanner.done else scanner.closed(scanned)) is not None


@pytest.mark.parametrize("tool_format", ALL)
def test_function_that_is_not_offered_is_text(tool_format: ToolFormat) -> None:
    text = ALL[tool_format].replace("get_weather", "steal").replace("add", "steal")
    assert events_of(config(tool_format), *text) == [Text(text)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_broken_calls_have_the_same_events_in_any_pieces(data: st.DataObject) -> None:
    tool_format = data.draw(st.sampled_from(list(ALL)))
    text = ALL[tool_format]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text)))
        more = data.draw(st.sampled_from(["", "<", ">", "}", '"', "\n", "x", "</parameter>", "\\", ",", "]"]))
        text = text[:at] + more + text[at + data.draw(st.integers(0, 4)) :]
    events = events_of(config(tool_format), text)
    check_order(events)
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=40))
    assert events_of(config(tool_format), *cut(text, sizes)) == events == events_of(config(tool_format), *text)


def test_string_up_to_an_impossible_escape_has_the_same_events_in_any_pieces() -> None:
    text = r'[get_weather(city="Ulm \xzz", days=[1])]'
    events = events_of(config(ToolFormat.PYTHONIC), text)
    assert events == events_of(config(ToolFormat.PYTHONIC), *text)
    assert [arguments for _, arguments in calls_of(events)] == ['{"city": "Ulm '], text_of(events)


def test_name_of_a_forced_call_that_was_cut_off_is_told() -> None:
    forced = config(ToolFormat.HERMES, must_call=True)
    assert events_of(forced, '<tool_call>\n{"name": "add", "argum') == [CallStart(0, "add")]
    assert events_of(forced, '<tool_call>\n{"name": "ad') == events_of(forced, "<tool_c") == []
    assert events_of(config(ToolFormat.HERMES), "<tool_c") == [Text("<tool_c")]
