"""Every event and complete message of Anthropic's format is an instance of its type, with no other fields."""

import json
from typing import Any, get_args

import msgspec
import pytest

from frontend.api.anthropic import messages
from frontend.api.anthropic import response_types as types
from frontend.errors import BadRequest
from frontend.output_parser.model_format import ParserConfig, Reasoning, ToolFormat
from frontend.request import Delta, Usage
from frontend.text.tokenizer import Tokenizer
from tests.frontend.api.harness import FakeDeltas, last, lines, parse_events, response_context

CONFIG = ParserConfig(Reasoning.UNDECIDED, ToolFormat.HERMES, ("f",))
CALL = '<think>hm</think>So <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
BY_TAG = {str(kind.__struct_config__.tag): kind for kind in get_args(types.MessageEvent)}


def is_exactly(value: Any, kind: type) -> bool:
    return bool(msgspec.to_builtins(msgspec.convert(value, kind)) == value)


@pytest.mark.parametrize("config", [None, CONFIG], ids=["text", "reasoning and calls"])
async def test_events_and_messages_are_of_their_types(tokenizer: Tokenizer, config: ParserConfig | None) -> None:
    context = response_context(tokenizer, parser_config=config, timings=True, continuous_usage=True)
    story = [[Delta(0, [65], [CALL], usage=Usage(3, 1))], [last()]]
    events = parse_events("".join(lines(messages.stream_writer(context), story)))
    plain = [{**event, **_without_raw(event)} for event in events]
    assert [event for event in plain if not is_exactly(event, BY_TAG[event["type"]])] == []
    answer = json.loads(await messages.complete(context, FakeDeltas(*story)))
    assert set(answer) <= {*types.Message.__struct_fields__}
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == (["thinking", "text", "tool_use"] if config else ["text"])


def _without_raw(event: dict[str, Any]) -> dict[str, Any]:
    """A tool_use block's `input` is raw JSON, which cannot be converted from values."""
    block = event.get("content_block", {})
    return {"content_block": {"type": "text", "text": ""}} if block.get("type") == "tool_use" else {}


def test_errors_are_of_their_type() -> None:
    assert is_exactly(json.loads(messages.error(BadRequest("x", param="thread"), "r")), types.AnthropicError)
