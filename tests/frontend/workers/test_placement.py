"""The placement of streams on workers: a worker's load follows every change, and is recounted after a while."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from frontend.workers.pool import REFRESH_S, Placement
from frontend.workers.routing import load
from frontend.workers.stream import Stream
from shared.messages import Sampling, Status, Submit, WorkerState
from shared.wire import pack_u32


class Connection:
    """The part of a connection that a placement reads."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.status: Status | None = None


class Rig:
    def __init__(self, workers: int, loop: asyncio.AbstractEventLoop) -> None:
        self.now = 0.0
        self.placement = Placement(lambda: self.now)
        self.connections: list[Any] = [Connection() for _ in range(workers)]
        self._loop, self._count = loop, 0

    def stream(self, prompt: int = 50, tokens: int = 20, group: int = 0) -> Stream:
        self._count += 1
        submit = Submit(self._count, pack_u32(range(prompt)), Sampling(tokens), group=group)
        return Stream(submit, self._loop.create_future())

    def put(self, stream: Stream, worker: int, saved: int = 0) -> Stream:
        self.leave(stream)
        self.connections[worker].streams[stream.submit.id] = stream
        self.placement.put(stream, self.connections[worker], saved)
        return stream

    def leave(self, stream: Stream) -> None:
        for connection in self.connections:
            connection.streams.pop(stream.submit.id, None)

    def loads(self) -> list[int]:
        return self.placement.loads(self.connections)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def test_sums_are_those_of_all_streams_under_random_changes(loop: asyncio.AbstractEventLoop) -> None:
    rig, drawn = Rig(4, loop), random.Random(3)
    live: list[Stream] = []
    assert rig.loads() == [0] * 4
    for _ in range(400):  # all at the same time, so that no load is recounted
        if not live or drawn.random() < 0.5:
            live.append(rig.put(rig.stream(drawn.randrange(1, 99), drawn.randrange(1, 2000)), drawn.randrange(4)))
        elif drawn.random() < 0.4:
            rig.put(drawn.choice(live), drawn.randrange(4))
        elif drawn.random() < 0.3:
            rig.leave(waiting := drawn.choice(live))
            rig.placement.put(waiting, None)
        else:
            rig.leave(gone := live.pop(drawn.randrange(len(live))))
            rig.placement.pop(gone)
        assert rig.loads() == [load(one.streams.values(), None) for one in rig.connections]
    assert len(rig.placement) == len(live) and set(rig.placement) == set(live)


def test_progress_and_statuses_are_seen_after_a_while(loop: asyncio.AbstractEventLoop) -> None:
    rig = Rig(2, loop)
    first = rig.put(rig.stream(), 0, saved=30)
    assert rig.loads() == [40, 0]
    first.output += [1, 2, 3]
    rig.connections[1].status = Status(1, 1, "m", "cpu", "float32", WorkerState.READY, expected_tokens=512)
    assert rig.loads() == [40, 0]
    rig.now += REFRESH_S * 1.01
    assert rig.loads() == [17, 512]


def test_worker_that_joins_is_counted_at_once(loop: asyncio.AbstractEventLoop) -> None:
    rig = Rig(2, loop)
    rig.put(rig.stream(), 1)
    assert rig.placement.loads(rig.connections[:1]) == [0]
    assert rig.loads() == [0, 70]


def test_group_stays_where_its_latest_sequence_went(loop: asyncio.AbstractEventLoop) -> None:
    rig = Rig(2, loop)
    assert rig.placement.group_home(7) is None
    streams = [rig.put(rig.stream(group=7), 1) for _ in range(2)]
    assert rig.placement.group_home(7) is rig.connections[1]
    rig.placement.pop(streams[0])
    assert rig.placement.group_home(7) is rig.connections[1]
    rig.placement.put(streams[1], None)
    assert rig.placement.group_home(7) is None and rig.placement.home(streams[1]) is None
    rig.placement.clear()
    assert len(rig.placement) == 0
