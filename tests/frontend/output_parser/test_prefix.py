"""The text that begins a call is found whole and in part."""

from frontend.output_parser.model_format import ToolFormat
from frontend.output_parser.tool_syntax import SYNTAX, PrefixMatch, find_prefix, partial_tag, prefixes_of


def found(tool_format: ToolFormat, text: str, later: bool = False) -> PrefixMatch | None:
    prefixes = prefixes_of(SYNTAX[tool_format])
    return find_prefix(text, prefixes.later if later else prefixes.first, prefixes.ahead)


def test_prefix_matches_up_to_the_arguments() -> None:
    text = '<tool_call>\n{ "name":"add","arguments" : '
    assert found(ToolFormat.HERMES, text + "{}") == PrefixMatch("add", len(text))
    assert found(ToolFormat.KIMI, "<|tool_call_begin|>functions.a-b:12<|tool_call_argument_begin|>{", later=True) == (
        "a-b", 63,
    )  # fmt: skip
    assert found(ToolFormat.LLAMA, '{"type": "function", "name": "f", "parameters": {') == ("f", 48)


def test_beginning_of_a_prefix_is_undecided_and_has_the_name_once_it_is_complete() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": '
    for at in range(len(text) + 1):
        assert found(ToolFormat.HERMES, text[:at]) == PrefixMatch("add" if at > 25 else "", None), text[:at]
    assert found(ToolFormat.GLM, "<tool_call>add") == PrefixMatch()
    assert found(ToolFormat.GLM, "<tool_call>add\n<arg") == PrefixMatch("add")


def test_other_text_is_no_prefix() -> None:
    for text in ('<tool_call>{"nam": ', '<tool_call>{"name": "a b"', '<tool_call>{"name": ""', "x"):
        assert found(ToolFormat.HERMES, text) is None
    assert found(ToolFormat.GLM, "<tool_call>add it") is None and found(ToolFormat.PYTHONIC, "[1]") is None


def test_partial_tag_is_the_longest_end_that_may_become_the_tag() -> None:
    assert partial_tag("a </th", "</think>") == 4 and partial_tag("a <<", "</think>") == 1
    assert partial_tag("a </think>", "</think>") == partial_tag("", "</think>") == 0
