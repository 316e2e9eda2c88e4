"""Whole outputs are split into text, reasoning and calls, in their order."""

import json

from frontend.output_parser.model_format import ParserConfig, Reasoning, ToolFormat
from frontend.output_parser.parser import Call, ParsedOutput

CONFIG = ParserConfig(Reasoning.UNDECIDED, ToolFormat.HERMES, frozenset({"add"}))
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_parse_collects_the_parts_in_order() -> None:
    parsed = ParsedOutput.parse(f"<think>Hm.</think>Two calls.\n{CALL}\n{CALL}", CONFIG)
    assert (parsed.reasoning, parsed.text) == ("Hm.", "Two calls.")
    assert parsed.calls == [Call("add", '{"a": 1}')] * 2
    assert parsed.parser.called


def test_parse_of_a_cut_off_call_keeps_its_beginning() -> None:
    parsed = ParsedOutput.parse(CALL[: CALL.index("1") + 1], CONFIG)
    assert parsed.calls == [Call("add", '{"a": 1')] and not parsed.parser.called


def test_closed_arguments_of_a_cut_off_call_are_json() -> None:
    assert Call("add", '{"a": 1, "b": [2, {"c": "x').closed_arguments == '{"a": 1, "b": [2, {}]}'
    assert json.loads(Call("add", '{"a"').closed_arguments) == {}
    assert Call("add", '{"a": 1}').closed_arguments == '{"a": 1}'
