"""A grammar and a parser agree on what ends reasoning."""

import pytest

from frontend.output_parser import model_format
from frontend.output_parser.events import ReasoningText, Text
from frontend.output_parser.model_format import (
    MARKS,
    TAGS,
    THINK,
    ParserConfig,
    Reasoning,
    Tags,
    ToolFormat,
    reasoning_marks,
)
from frontend.output_parser.parser import ParsedOutput


@pytest.mark.parametrize(("tool_format", "tags"), [
    (ToolFormat.MISTRAL_ARGS, ("[THINK]", "[/THINK]")), (ToolFormat.HARMONY, THINK),
    *[(ToolFormat.HERMES, tags) for tags in TAGS],
])  # fmt: skip
def test_forced_texts_end_the_reasoning_that_the_opening_began(tool_format: ToolFormat, tags: Tags) -> None:
    one = reasoning_marks(tool_format, tags)
    answer = "final<|message|>Yes." if tool_format is ToolFormat.HARMONY else "Yes."
    text = "".join([*one.opening, "Hm", *one.forced, answer])
    for spelling, stand_in in MARKS.get(tool_format, {}).items():
        text = text.replace(spelling, stand_in)
    parsed = ParsedOutput.parse([text], ParserConfig(Reasoning.UNDECIDED, tool_format, tags=tags))
    assert parsed.parts == [ReasoningText("Hm"), Text("Yes.")] and one.forced[0] == one.closing
    assert model_format.spelled(text).startswith(one.opening[0])
