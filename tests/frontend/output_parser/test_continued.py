"""An output that is continued at any token is parsed as if from its beginning."""

import pytest

from frontend.output_parser.events import CallStart
from frontend.output_parser.model_format import ParserConfig, Reasoning, ToolFormat
from frontend.output_parser.parser import ContinuedParser, ParsedOutput, output_parser
from tests.frontend.output_parser.joining import called, joined

CONFIG = ParserConfig(Reasoning.UNDECIDED, ToolFormat.HERMES, frozenset({"add"}))
ARGUMENTS = ['{"a": 1}', '{"a": 2}']
CALLS = [f'<tool_call>\n{{"name": "add", "arguments": {one}}}\n</tool_call>' for one in ARGUMENTS]
TEXT = f"<think>Hm.</think>Two calls.\n{CALLS[0]}\n{CALLS[1]}"


@pytest.mark.parametrize("place", range(len(TEXT) + 1))
def test_parts_after_a_place_end_as_the_whole_output_does(place: int) -> None:
    whole = ParsedOutput.parse([TEXT], CONFIG)
    rest = ParsedOutput.parse([*TEXT[place:]], CONFIG, len(TEXT) - place, [TEXT[:place]])
    assert whole.text.endswith(rest.text) and whole.reasoning.endswith(rest.reasoning) and rest.parser.called
    ends = [TEXT.index(call) + len(call) for call in CALLS]
    before = sum(end <= place for end in ends)
    assert rest.calls == whole.calls[before:] or rest.calls == whole.calls[before + 1 :], "an end may be certain early"
    thought = range(len("<think>") - 1, TEXT.index("</think>") + len("</think>"))
    assert rest.reasoning_tokens == sum(at >= place for at in thought)


def test_call_that_the_place_cuts_is_told_in_whole_and_counts_from_zero() -> None:
    place = TEXT.rindex('"a"')
    parser = ContinuedParser(output_parser(CONFIG), [TEXT[:20], TEXT[20:place]])
    assert parser.reasoning is Reasoning.DONE and not parser.called
    events = parser.feed(TEXT[place:])
    assert events[0] == CallStart(0, "add")
    assert joined(events + parser.finish()) == called(0, "add", ARGUMENTS[1]) and parser.called


def test_call_that_never_goes_on_is_told_at_the_end() -> None:
    parser = ContinuedParser(output_parser(CONFIG), [TEXT[: TEXT.index('"a"') + 3]])
    first, *rest = parser.finish()
    assert first == CallStart(0, "add") and len(rest) == 1
