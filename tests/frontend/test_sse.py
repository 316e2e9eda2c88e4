"""Both ways to the socket say the same: whatever is written directly and whatever is awaited, nothing is lost,
doubled or out of order, and the end is told once."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import chain, cycle, repeat

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.server.sse import KEEP_ALIVE, EventStream

PIECES = st.lists(st.binary(max_size=4), max_size=20)
WAYS = st.lists(st.booleans(), min_size=1, max_size=7)


class Socket:
    """What is written by either way; `ready` and how long an awaited write waits are as told, in turns."""

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


def said(pieces: list[bytes], failing: bool) -> Iterator[bytes]:
    yield from pieces
    if failing:
        raise ValueError


async def answer(pieces: list[bytes], failing: bool, socket: Socket, pauses: list[bool]) -> tuple[bytes, int]:
    """The body of an answer whose pieces come one after another, sometimes several between two turns of the loop."""
    told: list[Callable[[], None]] = []
    closed: list[bool] = []
    stream = EventStream(
        said(pieces, failing), told.append, stream_error=lambda exc: b"!", close=lambda: closed.append(True),
        keepalive_s=60.0, send=socket.send, direct=socket,  # type: ignore[arg-type]
    )  # fmt: skip
    task = asyncio.create_task(stream({"type": "http"}, never, socket.send))  # type: ignore[arg-type]
    while not told:
        await asyncio.sleep(0)
    pause = cycle(pauses)
    while not task.done():
        told[0]()
        if next(pause):
            await asyncio.sleep(0)
    await task
    assert closed
    return b"".join(socket.out), socket.ended


@settings(max_examples=100, deadline=None)
@given(PIECES, st.booleans(), WAYS, WAYS, WAYS.filter(any))
def test_all_ways_to_the_socket_give_the_same_bytes(
    pieces: list[bytes], failing: bool, ready: list[bool], slow: list[bool], pauses: list[bool]
) -> None:
    body = b"".join(pieces) + b"!" * failing
    assert asyncio.run(answer(pieces, failing, Socket(ready, slow), pauses)) == (body, 1)


async def test_silence_is_broken_by_a_comment_and_a_client_that_leaves_ends_it() -> None:
    told: list[Callable[[], None]] = []
    closed: list[bool] = []
    socket, left = Socket([True], [False]), asyncio.Event()

    async def receive() -> dict[str, object]:
        await left.wait()
        return {"type": "http.disconnect"}

    stream = EventStream(
        chain([b"a"], repeat(b"")), told.append, stream_error=lambda exc: b"!", close=lambda: closed.append(True),
        keepalive_s=0.02, send=socket.send, direct=socket,  # type: ignore[arg-type]
    )  # fmt: skip
    task = asyncio.create_task(stream({"type": "http"}, receive, socket.send))  # type: ignore[arg-type]
    while not told:
        await asyncio.sleep(0)
    told[0]()
    while KEEP_ALIVE not in socket.out:
        await asyncio.sleep(0.005)
    assert socket.out[0] == b"a" and not closed
    left.set()
    await asyncio.wait_for(task, 5)
    assert closed
