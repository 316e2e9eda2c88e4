"""A link against every order, loss and age of frames: whatever the wire did, once it is calm nothing is missing."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq

from frontend.workers.connection import WorkerConnection
from frontend.workers.listener import WireCounters
from frontend.workers.stream import Stream
from shared import messages as m
from shared.address import Address
from shared.codec import decode_request, pack_u32
from shared.messages import WorkerState
from tests.wire.harness import sampling

ME, EPOCH = b"frontend", 3


@dataclass
class Worker:
    """Counts up for each stream; every frame and Status it sends waits in `wire`."""

    lengths: dict[int, int]
    said: dict[int, int] = field(default_factory=dict)
    seq: int = 0
    wire: list[m.Event] = field(default_factory=list)

    def step(self) -> None:
        live = [id for id in self.lengths if self.said.get(id, 0) < self.lengths[id]]
        if live:
            starts = [self.said.get(id, 0) for id in live]
            self.said |= {id: start + 1 for id, start in zip(live, starts, strict=True)}
            self._send(live, starts, [[start] for start in starts])

    def answer(self, request: m.Resync) -> None:
        self._send([request.id], [request.offset], [list(range(request.offset, self.said.get(request.id, 0)))])

    def status(self) -> None:
        peer = m.ConnectedFrontend(ME.hex(), 1, len(self.lengths), self.seq)
        self.wire.append(m.Status(EPOCH, 1, "m", "cpu", "float32", WorkerState.READY, frontends=(peer,)))

    def _send(self, ids: list[int], starts: list[int], runs: list[list[int]]) -> None:
        ends = tuple(m.End(id, m.Outcome.LENGTH, self.lengths[id]) for id in ids if self.said[id] == self.lengths[id])
        flat = [token for run in runs for token in run]
        counts = [len(run) for run in runs]
        step = m.Step(EPOCH, self.seq, pack_u32(ids), pack_u32(starts), pack_u32(counts), pack_u32(flat), ends=ends)
        self.wire.append(step)
        self.seq += 1


class Socket:
    """Takes requests, and has no events."""

    def __init__(self) -> None:
        self.sent: list[m.Request] = []

    def send(self, data: bytes, flags: int) -> None:
        self.sent.append(decode_request(data))

    def recv_multipart(self, flags: int) -> Any:
        raise zmq.Again

    def getsockopt(self, option: int) -> int:
        return int(zmq.POLLOUT)


class Listener:
    def __init__(self) -> None:
        self.ends: dict[Stream, m.End] = {}

    def stream_ended(self, stream: Stream, end: m.End) -> None:
        assert stream not in self.ends
        self.ends[stream] = end

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called")


def connected(listener: Listener, lengths: dict[int, int]) -> WorkerConnection:
    """A link that has just put these streams."""
    link = WorkerConnection(Address("w", "ipc://w/r", "ipc://w/e"), ME, listener, WireCounters(), stall_timeout=60.0)
    link._requests = link._events = Socket()  # type: ignore[assignment]
    welcome = m.Welcome(link._nonce, EPOCH, 1, "m", "", m.Limits(100, 100, ()))
    link.welcome, link.epoch = welcome, EPOCH
    for id in lengths:
        stream = Stream(m.Submit(id, b"", sampling(1)), asyncio.get_running_loop().create_future())
        stream.admission.set_result(0)
        link.streams[id] = stream
    return link


def answered(link: WorkerConnection, worker: Worker) -> None:
    sent: list[m.Request] = link._requests.sent  # type: ignore[attr-defined]
    for request in sent:
        if isinstance(request, m.Resync):
            worker.answer(request)
    sent.clear()


@pytest.mark.parametrize("loss", [0.0, 0.3])
async def test_no_order_of_frames_leaves_a_hole(loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(300):
        dice, listener = random.Random(seed), Listener()
        asking = 0.3  # how often a stream may ask: not again so soon after it did
        monkeypatch.setattr(Stream, "may_resync", lambda stream, now: dice.random() < asking)  # noqa: B023
        worker, now = Worker({1: 12, 2: 60, 3: 30}), 0.0
        link = connected(listener, worker.lengths)
        kept = dict(link.streams)
        for _ in range(dice.randrange(100, 500)):
            what = dice.random()
            if what < 0.25:
                worker.step()
            elif what < 0.35:
                worker.status()
            elif what < 0.45:
                answered(link, worker)
            elif worker.wire:
                event = worker.wire.pop(dice.randrange(len(worker.wire)))
                if dice.random() >= loss:
                    link._on_event(msgspec.structs.replace(event))
        while any(worker.said.get(id, 0) < length for id, length in worker.lengths.items()):
            worker.step()
        dice.shuffle(worker.wire)
        for _ in range(4):  # calm: what was late comes, and each Status and tick is heard
            asking = 0.0
            for event in worker.wire:
                link._on_event(event)
            worker.wire.clear()
            worker.status()
            now, asking = now + 1.0, 1.0
            link.tick(now)
            answered(link, worker)
        assert not link.streams, f"seed {seed}: {[(id, len(one.output)) for id, one in link.streams.items()]}"
        assert [one.output for one in kept.values()] == [list(range(length)) for length in worker.lengths.values()]
        assert len(listener.ends) == len(kept)
