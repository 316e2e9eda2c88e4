"""Every event and complete answer of responses is an instance of its type, with no other fields."""

import json
from typing import Any, get_args

import msgspec

from frontend.api.openai import responses
from frontend.api.openai import responses_types as types
from frontend.errors import Internal
from frontend.output_parser.model_format import ParserConfig, Reasoning, ToolFormat
from frontend.request import Delta
from frontend.text.tokenizer import Tokenizer
from tests.frontend.api.harness import FakeDeltas, last, lines, parse_events, response_context

CONFIG = ParserConfig(Reasoning.UNDECIDED, ToolFormat.HERMES, ("f",))
CALL = '<think>hm</think>So <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ECHOED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": 9, "max_tool_calls": None, "metadata": {}, "parallel_tool_calls": True,
    "reasoning": types.ReasoningSettings(effort=None), "temperature": 1.0,
    "text": types.TextSettings(format={"type": "text"}), "tool_choice": "auto", "tools": [], "top_logprobs": 0,
    "top_p": 1.0, "user": None,
}  # fmt: skip
BY_TAG = {str(kind.__struct_config__.tag): kind for kind in get_args(types.ResponseEvent)}


def is_exactly(value: Any, kind: type) -> bool:
    return bool(msgspec.to_builtins(msgspec.convert(value, kind)) == value)


async def test_events_and_answers_are_of_their_types(tokenizer: Tokenizer) -> None:
    context = response_context(tokenizer, parser_config=CONFIG, format_data=ECHOED, timings=True)
    story = [[Delta(0, [65], [CALL])], [last()]]
    events = parse_events("".join(lines(responses.stream_writer(context), story)))
    assert [event for event in events if not is_exactly(event, BY_TAG[event["type"]])] == []
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    written = {event["type"] for event in events}
    assert {"response.created", "response.reasoning_text.delta", "response.output_text.done"} <= written
    assert {"response.function_call_arguments.done", "response.completed"} <= written
    assert is_exactly(json.loads(await responses.complete(context, FakeDeltas(*story))), types.Response)


def test_events_of_a_failed_stream_are_of_their_types(tokenizer: Tokenizer) -> None:
    context = response_context(tokenizer, format_data=ECHOED)
    failed = parse_events(responses.stream_error(Internal("broken"), "r", context).decode())
    assert [event["type"] for event in failed] == ["error", "response.failed"]
    assert [event for event in failed if not is_exactly(event, BY_TAG[event["type"]])] == []
