"""Helpers for tests of API formats: requests as Python values, deltas to write, and a client that reads the result."""

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from frontend.api.answer import ResponseContext
from frontend.model_context import ModelContext
from frontend.request import Delta, Finish, GenerationRequest, ResponseOptions, Usage
from frontend.schema.decoding import convert
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling, Timings

WORDS = st.text("aé0 \n", max_size=4)  # a small alphabet: hypothesis' own takes seconds to build
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


SHOWN = [one.name for one in fields(ResponseOptions)]


async def parse(api_format: Any, body: Mapping[str, Any], context: ModelContext) -> GenerationRequest:
    request: GenerationRequest = await api_format.parse(convert(body, api_format.REQUEST), context)
    return request


def response_context(tokenizer: Tokenizer, **more: Any) -> ResponseContext:
    settings = {"prompts": ([1, 2, 3],), "sampling": Sampling(max_tokens=9), "model": "tiny", **more}
    shown = {name: settings.pop(name) for name in SHOWN if name in settings}
    return ResponseContext(
        GenerationRequest(**settings, shown=ResponseOptions(**shown)), tokenizer, nonce="0", created=1
    )


class FakeDeltas:
    """Serves lists of deltas to the writer of a stream, or to `complete`."""

    def __init__(self, *lists: list[Delta]) -> None:
        self._lists = iter(lists)

    def __iter__(self) -> Iterator[list[Delta]]:
        return self._lists

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        for deltas in self:
            yield deltas


def last(index: int = 0, ids: tuple[int, ...] = (), texts: tuple[str, ...] = (), **more: Any) -> Delta:
    settings = {
        "finish": Finish.EOS,
        "usage": Usage(3, 4, 2),
        "seed": 7,
        "timings": Timings(1.0, 2.0, 3.0, 2, (7, 5)),
        **more,
    }
    return Delta(index, list(ids), list(texts), **settings)


def lines(writer: Any, story: Iterable[list[Delta]]) -> list[str]:
    """Returns the lines that a stream's writer writes for each list of deltas, and at the end."""
    return [data.decode() for data in [*map(writer.write, story), writer.end()] if data]


def parse_sse(text: str) -> list[Any]:
    blocks = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    return [block if block == "[DONE]" else json.loads(block) for block in blocks]


def parse_events(text: str) -> list[Any]:
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def fold_chat(chunks: list[Any]) -> dict[str, Any]:
    """Assembles a chat's message from the chunks of a stream, as a client does."""
    choices: dict[int, dict[str, Any]] = {}
    for piece in [piece for chunk in chunks for piece in chunk["choices"]]:
        choice = choices.setdefault(piece["index"], {"index": piece["index"], "message": {}, "logprobs": None})
        delta, message = piece["delta"], choice["message"]
        choice["message"] = message | delta | {"content": (message.get("content") or "") + (delta.get("content") or "")}
        if piece["logprobs"]:
            found = (choice["logprobs"] or {"content": []})["content"] + piece["logprobs"]["content"]
            choice["logprobs"] = {"content": found, "refusal": None}
        choice |= {key: piece[key] for key in ("finish_reason", "stop_reason", "matched_stop", "seed") if key in piece}
    head = {key: chunks[0][key] for key in ("id", "created", "model", "system_fingerprint")}
    ordered = [choices[i] for i in sorted(choices)]
    return head | {"object": "chat.completion", "choices": ordered, "usage": chunks[-1]["usage"]}


def fold_message_events(events: list[Any]) -> dict[str, Any]:
    """Assembles the message from a stream's events, as a client of Anthropic's API does."""
    message: dict[str, Any] = {}
    for event in events:
        match event:
            case {"type": "message_start", "message": start}:
                message = start
            case {"type": "content_block_start", "content_block": block}:
                message["content"] = [*message["content"], block]
            case {"type": "content_block_delta", "index": index, "delta": {"text": text}}:
                message["content"][index]["text"] += text
            case {"type": "message_delta", "delta": delta, **rest}:
                message |= delta | {key: rest[key] for key in ("usage", "seed")}
    return message
