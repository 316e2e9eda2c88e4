"""Output whose reasoning stays in the text is parsed alike in pieces of every size."""

import pytest

from frontend.output_parser.events import CallStart, Event, Text
from frontend.output_parser.model_format import ParserConfig, Reasoning, ToolFormat
from frontend.output_parser.parser import output_parser
from tests.frontend.api.scripted import WEATHER

INNER = '<think>\nShall I <tool_call>{"name": "get_weather"}?\n</think>\n\nI look.'


def parse(text: str, reasoning: Reasoning, size: int) -> tuple[list[Event], bool]:
    config = ParserConfig(reasoning, ToolFormat.HERMES, frozenset({"get_weather"}), reasoning_is_text=True)
    parser = output_parser(config)
    events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
    return events + parser.finish(), parser.called


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_reasoning_is_text_as_it_was_written_and_calls_follow_it(size: int) -> None:
    for text, reasoning in ((INNER, Reasoning.UNDECIDED), (INNER[8:], Reasoning.OPEN)):
        events, called = parse(f"{text}\n{WEATHER}", reasoning, size)
        said = "".join(event.text for event in events if isinstance(event, Text))
        assert said == text and [event.name for event in events if isinstance(event, CallStart)] == ["get_weather"]
        assert called


@pytest.mark.parametrize("text", ["", "<thi", "plain <think> text", "<think>cut off", " \n"])
def test_output_without_whole_reasoning_is_not_lost(text: str) -> None:
    for size in (1, 3, 100):
        events, called = parse(text, Reasoning.UNDECIDED, size)
        assert "".join(event.text for event in events if isinstance(event, Text)) == text and not called
