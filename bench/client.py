"""A load client: sends completions at given times, stamps every body event, and keeps what happened.

Speaks HTTP/1.1 over plain sockets, one connection a request: the measured process should be the server.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a workload: when (seconds after the start), what, and how much."""

    at: float
    prompt: list[int] | str
    max_tokens: int


@dataclass(slots=True)
class Record:
    """What one request met. Times in seconds since the workload's start; `stamps` one a body event with text."""

    sent: float = 0.0
    stamps: list[float] = field(default_factory=list)
    done: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.stamps[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the name of the model there; `extra` goes into every body."""

    url: str
    model: str
    extra: dict[str, Any] = field(default_factory=dict)

    def body(self, call: Call) -> bytes:
        fields = {
            "model": self.model, "prompt": call.prompt, "max_tokens": call.max_tokens, "temperature": 0, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True}, **self.extra,
        }  # fmt: skip
        return json.dumps(fields).encode()


async def run(
    target: Target, calls: Iterable[Call], on_done: Callable[[Record], None] = lambda record: None
) -> list[Record]:
    """Send every call at its time and wait for all; a failed one has `error`."""
    start = time.perf_counter()

    async def one(call: Call) -> Record:
        await asyncio.sleep(call.at - (time.perf_counter() - start))
        record = Record(sent=time.perf_counter() - start)
        try:
            await _exchange(target, call, record, start)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            record.error = f"{type(error).__name__}: {error}"
        record.done = time.perf_counter() - start
        on_done(record)
        return record

    return await asyncio.gather(*(one(call) for call in calls))


async def _exchange(target: Target, call: Call, record: Record, start: float) -> None:
    place = urlsplit(target.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 24)
    body = target.body(call)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            record.error = (status + await reader.read(2000)).decode(errors="replace")
            return
        while line := await reader.readline():
            _take(line, record, start)
    finally:
        writer.close()
    if not record.error and not record.stamps:
        record.error = "the stream ended without a token"


def _take(line: bytes, record: Record, start: float) -> None:
    if not line.startswith(b"data: {"):
        return
    now = time.perf_counter() - start
    event = json.loads(line[6:])
    if "error" in event:
        record.error = str(event["error"])
        return
    if usage := event.get("usage"):
        record.prompt_tokens = usage["prompt_tokens"]
        record.completion_tokens = usage["completion_tokens"]
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if event.get("choices"):
        record.stamps.append(now)
