"""Every chunk and complete answer of completions and chat is an instance of its type, with no other fields."""

import json
from typing import Any

import msgspec
import pytest

from frontend.api.openai import chat, completions, response_types, typed_events
from frontend.output_parser.model_format import ParserConfig, Reasoning, ToolFormat
from frontend.request import Delta, TokenLogprob, Usage
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling
from tests.frontend.api.harness import FakeDeltas, last, lines, parse_sse, response_context

SCORES = [TokenLogprob(65, -0.5, ((65, -0.5), (66, -1.0)))]
RICH = {
    "sampling": Sampling(max_tokens=9, logprobs=2),
    "usage": True,
    "continuous_usage": True,
    "timings": True,
}
CALL = '<think>hm</think><tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
STORY = [[Delta(0, [65], ["A"], logprobs=SCORES, usage=Usage(3, 1))], [last(ids=(66,), texts=("B",), logprobs=SCORES)]]


def is_exactly(value: Any, kind: type) -> bool:
    """Whether `kind` describes a JSON value exactly: decoding and encoding it again loses no field."""
    return bool(msgspec.to_builtins(msgspec.convert(value, kind)) == value)


@pytest.mark.parametrize("more", [{}, RICH], ids=["plain", "rich"])
@pytest.mark.parametrize(("api_format", "chunk", "answer"), [
    (completions, response_types.CompletionChunk, response_types.Completion),
    (chat, response_types.ChatCompletionChunk, response_types.ChatCompletion),
])  # fmt: skip
async def test_chunks_and_answers_are_of_their_types(
    tokenizer: Tokenizer, api_format: Any, chunk: type, answer: type, more: dict[str, Any]
) -> None:
    story = STORY if more else [[Delta(0, [65], ["A"])], [last(ids=(66,), texts=("B",))]]
    context = response_context(tokenizer, **more)
    *chunks, done = parse_sse("".join(lines(api_format.stream_writer(context), story)))
    assert done == "[DONE]" and len(chunks) >= 2
    assert [one for one in chunks if not is_exactly(one, chunk)] == []
    assert is_exactly(json.loads(await api_format.complete(context, FakeDeltas(*story))), answer)


async def test_chat_chunks_with_reasoning_and_calls_are_of_their_type(tokenizer: Tokenizer) -> None:
    config = ParserConfig(Reasoning.UNDECIDED, ToolFormat.HERMES, ("f",))
    context = response_context(tokenizer, parser_config=config)
    story = [[Delta(0, [65], [CALL])], [last()]]
    *chunks, _ = parse_sse("".join(lines(chat.stream_writer(context), story)))
    assert [one for one in chunks if not is_exactly(one, response_types.ChatCompletionChunk)] == []
    deltas = [choice["delta"] for one in chunks for choice in one["choices"]]
    assert any("reasoning" in delta for delta in deltas) and any("tool_calls" in delta for delta in deltas)
    answer = json.loads(await chat.complete(context, FakeDeltas(*story)))
    assert is_exactly(answer, response_types.ChatCompletion)
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_typed_events_are_of_their_types(tokenizer: Tokenizer) -> None:
    kinds = {"token": response_types.TokenEvent, "done": response_types.DoneEvent}
    written = "".join(lines(typed_events.stream_writer(response_context(tokenizer, timings=True)), STORY))
    events = [block.split("\n", 1) for block in written.strip().split("\n\n")]
    assert [name for name, _ in events] == ["event: token", "event: token", "event: done"]
    for name, data in events:
        assert is_exactly(json.loads(data.removeprefix("data: ")), kinds[name.removeprefix("event: ")])
