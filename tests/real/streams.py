"""Reads complete streams of OpenAI's completions and chats."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Streamed:
    """The content of the only choice of a stream."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


def read(client: httpx.Client, route: str, body: dict[str, Any]) -> Streamed:
    """Reads a stream to its end. Raises AssertionError unless the answer is a complete stream."""
    found = Streamed()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    with client.stream("POST", route, json=asked) as response:
        if response.status_code != 200:
            response.read()
            raise AssertionError(f"{response.status_code}: {response.text}")
        for chunk in _chunks(response):
            found.usage = chunk.get("usage") or found.usage
            for choice in chunk["choices"]:
                delta = choice.get("delta", choice)
                found.text += delta.get("text") or delta.get("content") or ""
                found.ids += choice.get("token_ids") or []
                found.prompt_ids += choice.get("prompt_token_ids") or chunk.get("prompt_token_ids") or []
                found.finish_reason = choice["finish_reason"] or found.finish_reason
    return found


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    done = False
    for line in response.iter_lines():  # as in many clients, lines also end at U+2028 and similar characters
        if line.startswith("data: "):
            assert not done, "something came after the end"
            done = line == "data: [DONE]"
            if not done:
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                yield chunk
    assert done, "the stream has no end"
