"""Direct and awaited writes give the same bytes: nothing is lost, doubled or out of order, and there is one end."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import chain, cycle, repeat

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.request import Delta
from frontend.server.sse import JSON_LINES, SERVER_SENT_EVENTS, EventStream
from tests.patience import PATIENCE_S

PIECES = st.lists(st.binary(max_size=4), max_size=20)
WAYS = st.lists(st.booleans(), min_size=1, max_size=7)


class Socket:
    """Collects direct and awaited writes.

    ready: whether a direct write is possible. slow: whether an awaited write waits. Values are used in turn.
    """

    def __init__(self, ready: list[bool], slow: list[bool]) -> None:
        self.out: list[bytes] = []
        self.ended = 0
        self._ready, self._slow = cycle(ready), cycle(slow)

    def ready(self) -> bool:
        return next(self._ready)

    def write(self, body: bytes) -> None:
        self.out.append(body)

    async def send(self, message: dict[str, object]) -> None:  # type: ignore[override]
        for _ in range(3 if next(self._slow) else 0):
            await asyncio.sleep(0)
        if message["type"] == "http.response.body":
            self.out.append(message["body"])  # type: ignore[arg-type]
            self.ended += not message["more_body"]


async def never() -> dict[str, object]:
    await asyncio.sleep(60)
    raise AssertionError


class Source:
    """Each poll returns the next piece. Then the source ends, ends with an error or raises, as `how` says."""

    def __init__(self, pieces: Iterator[bytes], how: str = "end") -> None:
        self.ended, self.detached = False, False
        self.error: Exception | None = None
        self.callbacks: list[Callable[[], None]] = []
        self._pieces = pieces
        self._how = how

    def on_ready(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def detach(self) -> None:
        self.detached = True

    def poll(self) -> list[Delta]:
        piece = next(self._pieces, None)
        if piece is not None:
            return [Delta(0, [], [piece.decode("latin-1")])]
        if self._how == "raise":
            raise ValueError
        self.ended = True
        self.error = ValueError() if self._how == "error" else None
        return []


class Writer:
    def write(self, deltas: list[Delta]) -> bytes:
        return "".join(delta.text for delta in deltas).encode("latin-1")

    def end(self) -> bytes:
        return b"."


async def answer(pieces: list[bytes], how: str, socket: Socket, pauses: list[bool]) -> tuple[bytes, int]:
    """Returns the body of an answer whose pieces arrive one by one, or sometimes several in a turn of the loop."""
    source = Source(iter(pieces), how)
    closed: list[bool] = []
    stream = EventStream(
        source, Writer(), stream_error=lambda exc: b"!", close=lambda: closed.append(True),
        keepalive_s=60.0, framing=SERVER_SENT_EVENTS, send=socket.send, direct=socket,  # type: ignore[arg-type]
    )  # fmt: skip
    task = asyncio.create_task(stream({"type": "http"}, never, socket.send))  # type: ignore[arg-type]
    while not source.callbacks:
        await asyncio.sleep(0)
    pause = cycle(pauses)
    while not task.done():
        source.callbacks[0]()
        if next(pause):
            await asyncio.sleep(0)
    await task
    assert closed and source.detached
    return b"".join(socket.out), socket.ended


@settings(max_examples=100, deadline=None)
@given(PIECES, st.sampled_from(["end", "error", "raise"]), WAYS, WAYS, WAYS.filter(any))
def test_event_stream_writes_the_same_bytes_directly_and_awaited(
    pieces: list[bytes], how: str, ready: list[bool], slow: list[bool], pauses: list[bool]
) -> None:
    body = b"".join(pieces) + (b"." if how == "end" else b"!")
    assert asyncio.run(answer(pieces, how, Socket(ready, slow), pauses)) == (body, 1)


async def test_event_stream_sends_keep_alive_comments_until_the_client_leaves() -> None:
    source = Source(chain([b"a"], repeat(b"")))
    closed: list[bool] = []
    socket, left = Socket([True], [False]), asyncio.Event()

    async def receive() -> dict[str, object]:
        await left.wait()
        return {"type": "http.disconnect"}

    stream = EventStream(
        source, Writer(), stream_error=lambda exc: b"!", close=lambda: closed.append(True),
        keepalive_s=0.02, framing=SERVER_SENT_EVENTS, send=socket.send, direct=socket,  # type: ignore[arg-type]
    )  # fmt: skip
    task = asyncio.create_task(stream({"type": "http"}, receive, socket.send))  # type: ignore[arg-type]
    while not source.callbacks:
        await asyncio.sleep(0)
    source.callbacks[0]()
    while SERVER_SENT_EVENTS.keep_alive not in socket.out:
        await asyncio.sleep(0.005)
    assert socket.out[0] == b"a" and not closed
    left.set()
    await asyncio.wait_for(task, PATIENCE_S)
    assert closed


async def test_lines_of_json_are_their_type_and_have_no_keep_alive() -> None:
    source = Source(chain([b"a"], repeat(b"")))
    socket, left = Socket([True], [False]), asyncio.Event()

    async def receive() -> dict[str, object]:
        await left.wait()
        return {"type": "http.disconnect"}

    stream = EventStream(
        source, Writer(), stream_error=lambda exc: b"!", close=lambda: None,
        keepalive_s=0.01, framing=JSON_LINES, send=socket.send, direct=socket,  # type: ignore[arg-type]
    )  # fmt: skip
    assert stream.headers["content-type"].startswith("application/x-ndjson")
    task = asyncio.create_task(stream({"type": "http"}, receive, socket.send))  # type: ignore[arg-type]
    while not source.callbacks:
        await asyncio.sleep(0)
    source.callbacks[0]()
    await asyncio.sleep(0.1)
    left.set()
    await asyncio.wait_for(task, PATIENCE_S)
    assert b"".join(socket.out) == b"a"
