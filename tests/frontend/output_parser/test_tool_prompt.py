"""The description of tools as text in a prompt."""

import json

from frontend.output_parser.events import CallStart
from frontend.output_parser.model_format import ToolFormat
from frontend.output_parser.tool_syntax import call_text, instructions, result_text
from tests.frontend.output_parser.examples import FUNCTIONS, config
from tests.frontend.output_parser.joining import events_of


def test_instructions_describe_each_function_and_the_format() -> None:
    told = instructions(FUNCTIONS, ToolFormat.HERMES)
    tools = told.partition("<tools>\n")[2].partition("\n</tools>")[0].split("\n")
    assert [json.loads(one)["name"] for one in tools] == ["get_weather", "add"]
    assert call_text("NAME", "ARGUMENTS") in told


def test_instructions_show_calls_as_the_parser_finds_them() -> None:
    for tool_format in (ToolFormat.HERMES, ToolFormat.DEEPSEEK_V3, ToolFormat.DEEPSEEK_V31):
        example = instructions(FUNCTIONS, tool_format).partition("this form:\n")[2].partition("\nSeveral")[0]
        call = example.replace("NAME", "add").replace("ARGUMENTS", "{}")
        assert events_of(config(tool_format), call)[0] == CallStart(0, "add"), example


def test_calls_and_results_are_tagged() -> None:
    assert call_text("f", {"ü": 1}) == '<tool_call>\n{"name": "f", "arguments": {"ü": 1}}\n</tool_call>'
    assert result_text("20") == "<tool_response>\n20\n</tool_response>"
