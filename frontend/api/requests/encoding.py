"""Encodes JSON for responses.

The event loop serves all streams, so nothing long is encoded in one piece: a JsonArray encodes what it gets a few
entries at a time, and `in_slices` gives other tasks their turn.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

FEW_ENTRIES = 4096  # encoding so many log-probabilities takes a few milliseconds
SLICE_S = 0.005  # how long one task may keep the others of the event loop waiting

T = TypeVar("T")


def to_json(value: Any) -> bytes:
    """Encodes a value as JSON in one line.

    Python's `str.splitlines`, by which httpx splits streams, takes three non-ASCII characters for line ends. They can
    occur only in strings, so they are written as escapes.
    """
    data = _encode(value)
    if data.isascii():
        return data
    for character, escape in _LINE_ENDS:
        data = data.replace(character, escape)  # 50 ns without a match; a check by `in` takes five times as long
    return data


class JsonArray:
    """An array in JSON that grows. Encoded entries take a tenth of the memory of their objects."""

    def __init__(self, each: int = 256) -> None:
        """each: how many entries are encoded together"""
        self._each = each
        self._done: list[bytes] = []
        self._pending: list[Any] = []

    def append(self, value: Any) -> None:
        self._pending.append(value)
        if len(self._pending) >= self._each:
            self._flush()

    def extend(self, values: Iterable[Any]) -> None:
        for value in values:
            self.append(value)

    def _flush(self) -> None:
        if self._pending:
            self._done.append(to_json(self._pending)[1:-1])
            self._pending.clear()

    @property
    def raw(self) -> msgspec.Raw:
        """The array so far."""
        self._flush()
        return msgspec.Raw(b"[%b]" % b",".join(self._done))


async def made(make: Callable[[], T], entries: int) -> T:
    """Returns make(): computed here if it encodes few entries, else in a thread, which gives way every 5 ms."""
    return make() if entries <= FEW_ENTRIES else await asyncio.to_thread(make)


async def in_slices(values: Iterable[T], use: Callable[[T], None]) -> None:
    """Calls `use` with each value. After SLICE_S, other tasks of the event loop get a turn."""
    until = time.perf_counter() + SLICE_S
    for value in values:
        use(value)
        if time.perf_counter() > until:
            await asyncio.sleep(0)
            until = time.perf_counter() + SLICE_S


_encode = msgspec.json.Encoder().encode
_LINE_ENDS = tuple((character.encode(), b"\\u%04x" % ord(character)) for character in "\x85\u2028\u2029")
