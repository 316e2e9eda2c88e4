"""The output parser's events, joined, are the same however the text was cut into pieces."""

from frontend.output_parser.events import CallArguments, CallEnd, CallStart, ReasoningText
from frontend.output_parser.model_format import ParserConfig, Reasoning, ToolFormat
from tests.frontend.output_parser.joining import events_of

OUTPUT = '<think>I see</think>\n\nSo <tool_call>\n{"name": "f", "arguments": {"a": [1, 2]}}\n</tool_call>'


CONFIG = ParserConfig(Reasoning.UNDECIDED, ToolFormat.HERMES, frozenset({"f"}))


def test_events_joined_do_not_depend_on_the_cuts() -> None:
    whole = events_of(CONFIG, OUTPUT)
    assert whole[0] == ReasoningText("I see") and CallStart(0, "f") in whole and whole[-1] == CallEnd(0)
    assert CallArguments(0, '{"a": [1, 2]}') in whole
    for size in (1, 2, 3, 7):
        assert events_of(CONFIG, *[OUTPUT[at : at + size] for at in range(0, len(OUTPUT), size)]) == whole
