"""A load client: sends completions at given times and records when tokens arrive.

Uses HTTP/1.1 over plain sockets, one connection per request, so that the client costs little compared with the server.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan
from typing import Any
from urllib.parse import SplitResult, urlsplit

from bench.client.http_response import HttpResponse, MalformedResponse

TIMEOUT_S = 900.0  # time limit for one complete response
READ_BYTES = 1 << 16
NO_DONE = "the stream ended without [DONE]"


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a workload. at: the time to send it, in seconds after the workload's start."""

    at: float
    prompt: list[int] | str
    max_tokens: int


@dataclass(slots=True)
class Record:
    """The result of one request. Times are in seconds since the workload's start.

    stamps: the time of each arrival of tokens. counts: the number of tokens in each arrival; if empty, every arrival
    has one token.
    """

    sent: float = 0.0
    stamps: list[float] = field(default_factory=list)
    done: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    counts: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.stamps[0] - self.sent

    @property
    def tokens(self) -> list[int]:
        """The number of tokens that arrived at each stamp."""
        return self.counts or [1] * len(self.stamps)

    @property
    def gaps(self) -> list[float]:
        """Waiting times between arrivals of tokens, one for each arrival after the first.

        Tokens that arrive together, in one chunk or several, count as one arrival with one wait. If every further token
        of an arrival counted as a wait of 0, a server that holds tokens back would look better. If the wait were
        divided among the tokens, long stalls would be hidden. `per_token` does not depend on this choice.
        """
        return [b - a for a, b in pairwise(self.stamps)]

    @property
    def per_token(self) -> float:
        """Mean time per token after the first arrival; nan if no token follows."""
        behind = sum(self.tokens[1:])
        return (self.stamps[-1] - self.stamps[0]) / behind if behind else nan


@dataclass(frozen=True, slots=True)
class Target:
    """A server. model: the server's name for the model. extra: fields added to the body of every request. without:
    names of fields that are left out of the body, because the server does not support them."""

    url: str
    model: str
    extra: dict[str, Any] = field(default_factory=dict)
    without: frozenset[str] = frozenset()

    def body(self, call: Call) -> bytes:
        """Returns the body of a request. The body asks for usage in every event (continuous usage) where the server
        supports it, because this gives the token count even of an event without text."""
        fields = {
            "model": self.model, "prompt": call.prompt, "max_tokens": call.max_tokens, "temperature": 0, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, **self.extra,
        }  # fmt: skip
        return json.dumps({name: value for name, value in fields.items() if name not in self.without}).encode()


async def run(
    target: Target,
    calls: Iterable[Call],
    on_done: Callable[[Record], None] = lambda record: None,
    *,
    sequential: bool = False,
) -> list[Record]:
    """Sends every call at its time, or one by one if `sequential`, and waits for all. Returns their records; the record
    of a failed call has an `error`."""
    start = time.perf_counter()

    async def one(call: Call) -> Record:
        await asyncio.sleep(call.at - (time.perf_counter() - start))
        record = Record(sent=time.perf_counter() - start)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await _exchange(target, call, record, start)
        except TimeoutError:
            record.error = f"no end within {TIMEOUT_S:.0f} s"
        except OSError as error:
            record.error = f"connection lost or refused ({type(error).__name__})"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            record.error = str(error) if isinstance(error, MalformedResponse) else f"not understood ({error!r})"
        record.done = record.done or time.perf_counter() - start
        on_done(record)
        return record

    if sequential:
        return [await one(call) for call in calls]
    return await asyncio.gather(*(one(call) for call in calls))


async def _exchange(target: Target, call: Call, record: Record, start: float) -> None:
    url = urlsplit(target.url)
    secure = url.scheme == "https"
    reader, writer = await asyncio.open_connection(url.hostname, url.port or (443 if secure else 80), ssl=secure)
    writer.write(_request(url, target.body(call)))
    response, events, body = HttpResponse(), _Events(record), b""
    try:
        while not response.complete and (data := await reader.read(READ_BYTES)):
            now = time.perf_counter() - start
            for line in response.feed(data):
                if response.status == 200:
                    events.take(line, now)
                else:
                    body += line
        body += response.finish()
    finally:
        writer.close()
    record.error = record.error or (events.problem() if response.status == 200 else _error_text(response.status, body))


def _request(url: SplitResult, body: bytes) -> bytes:
    path = url.path.rstrip("/").removesuffix("/v1") + "/v1/completions"
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _error_text(status: int, body: bytes) -> str:
    try:
        reason = json.loads(body)["error"]
        return f"{status}: {reason['message'] if isinstance(reason, dict) else reason}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {body[:200].decode(errors='replace')}"


class _Events:
    """Fills a record from the lines of an event stream."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._running = True  # whether every event so far had continuous usage
        self._ended = False

    def take(self, line: bytes, now: float) -> None:
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self._ended, self._record.done = True, now
            return
        event = json.loads(data)
        if "error" in event:
            error = event["error"]
            self._record.error = str(error["message"] if isinstance(error, dict) and "message" in error else error)
            return
        tokens = self._usage(event.get("usage"))
        for choice in event.get("choices") or ():
            self._stamp(choice, tokens, now)

    def _usage(self, usage: dict[str, Any] | None) -> int | None:
        """Returns the number of tokens since the previous usage, or None if the event has no usage."""
        if not usage:
            return None
        record = self._record
        new = int(usage["completion_tokens"]) - record.completion_tokens
        record.prompt_tokens = usage["prompt_tokens"]
        record.completion_tokens = usage["completion_tokens"]
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return new

    def _stamp(self, choice: dict[str, Any], tokens: int | None, now: float) -> None:
        if choice.get("finish_reason") and not choice.get("text"):
            return  # an event that only reports the end has the usage of the whole response
        self._running = self._running and tokens is not None
        count = tokens if self._running and tokens is not None else int(bool(choice.get("text")))
        record = self._record
        if count > 0 and record.stamps and record.stamps[-1] == now:  # arrived in the same read as the previous tokens
            record.counts[-1] += count
        elif count > 0:
            record.stamps.append(now)
            record.counts.append(count)

    def problem(self) -> str:
        if not self._ended:
            return NO_DONE
        return "" if self._record.stamps else "the stream ended without a token"
