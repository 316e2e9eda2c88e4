"""frontend/workers/connection.py: its states, and its repair of streams whatever the order, loss and age of frames."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq

from frontend.workers.connection import NO_EPOCH, SILENCE_S, ConnectionCounters, WorkerConnection
from frontend.workers.status import ConnectionState, not_ready
from frontend.workers.stream import Stream
from shared import messages as m
from shared.address import Address
from shared.messages import WorkerState
from shared.wire import decode_request, pack_u32
from tests.wire.harness import sampling

ME, EPOCH = b"frontend", 3


@dataclass
class Worker:
    """A fake worker that sends the tokens 0, 1, 2 … to each stream; its frames and statuses collect in `wire`."""

    lengths: dict[int, int]
    sent_tokens: dict[int, int] = field(default_factory=dict)
    seq: int = 0
    wire: list[m.Event] = field(default_factory=list)

    def step(self) -> None:
        live = [id for id in self.lengths if self.sent_tokens.get(id, 0) < self.lengths[id]]
        if live:
            starts = [self.sent_tokens.get(id, 0) for id in live]
            self.sent_tokens |= {id: start + 1 for id, start in zip(live, starts, strict=True)}
            self._send(live, starts, [[start] for start in starts])

    def answer(self, request: m.Resync) -> None:
        self._send([request.id], [request.offset], [list(range(request.offset, self.sent_tokens.get(request.id, 0)))])

    def status(self) -> None:
        peer = m.ConnectedFrontend(ME.hex(), 1, len(self.lengths), self.seq)
        self.wire.append(m.Status(EPOCH, 1, "m", "cpu", "float32", WorkerState.READY, frontends=(peer,)))

    def _send(self, ids: list[int], starts: list[int], runs: list[list[int]]) -> None:
        ends = tuple(
            m.End(id, m.Outcome.LENGTH, self.lengths[id]) for id in ids if self.sent_tokens[id] == self.lengths[id]
        )
        flat = [token for run in runs for token in run]
        counts = [len(run) for run in runs]
        step = m.Step(EPOCH, self.seq, pack_u32(ids), pack_u32(starts), pack_u32(counts), pack_u32(flat), ends=ends)
        self.wire.append(step)
        self.seq += 1


class Socket:
    """A socket that accepts requests, and never has events."""

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

    def reported(self, connection: WorkerConnection, status: m.Status) -> None: ...

    def stream_ended(self, stream: Stream, end: m.End) -> None:
        assert stream not in self.ends
        self.ends[stream] = end

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called")


def connected(listener: Listener, lengths: dict[int, int]) -> WorkerConnection:
    """Returns a connection that has just submitted these streams."""
    connection = WorkerConnection(
        Address("w", "ipc://w/r", "ipc://w/e"), ME, listener, ConnectionCounters(), stall_timeout=60.0
    )
    connection._requests = connection._events = Socket()  # type: ignore[assignment]
    welcome = m.Welcome(connection._nonce, EPOCH, 1, "m", "", m.Limits(100, 100, ()))
    connection.welcome, connection.epoch = welcome, EPOCH
    for id in lengths:
        stream = Stream(m.Submit(id, b"", sampling(1)), asyncio.get_running_loop().create_future())
        stream.admission.set_result(0)
        connection.streams[id] = stream
    return connection


def answered(connection: WorkerConnection, worker: Worker) -> None:
    sent: list[m.Request] = connection._requests.sent  # type: ignore[attr-defined]
    for request in sent:
        if isinstance(request, m.Resync):
            worker.answer(request)
    sent.clear()


@pytest.mark.parametrize("loss", [0.0, 0.3])
async def test_no_order_or_loss_of_frames_leaves_a_gap(loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(300):
        dice, listener = random.Random(seed), Listener()
        asking = 0.3  # probability that enough time has passed for a stream to ask for lost output
        monkeypatch.setattr(Stream, "may_resync", lambda stream, now: dice.random() < asking)  # noqa: B023
        worker, now = Worker({1: 12, 2: 60, 3: 30}), 0.0
        connection = connected(listener, worker.lengths)
        kept = dict(connection.streams)
        for _ in range(dice.randrange(100, 500)):
            what = dice.random()
            if what < 0.25:
                worker.step()
            elif what < 0.35:
                worker.status()
            elif what < 0.45:
                answered(connection, worker)
            elif worker.wire:
                event = worker.wire.pop(dice.randrange(len(worker.wire)))
                if dice.random() >= loss:
                    connection._on_event(msgspec.structs.replace(event))
        while any(worker.sent_tokens.get(id, 0) < length for id, length in worker.lengths.items()):
            worker.step()
        dice.shuffle(worker.wire)
        for _ in range(4):  # without further faults: late frames arrive, and so does every Status and tick
            asking = 0.0
            for event in worker.wire:
                connection._on_event(event)
            worker.wire.clear()
            worker.status()
            now, asking = now + 1.0, 1.0
            connection.tick(now)
            answered(connection, worker)
        assert not connection.streams, (
            f"seed {seed}: {[(id, len(stream.output)) for id, stream in connection.streams.items()]}"
        )
        assert [stream.output for stream in kept.values()] == [
            list(range(length)) for length in worker.lengths.values()
        ]
        assert len(listener.ends) == len(kept)


def status(state: WorkerState = WorkerState.READY, age: float = 0.0, epoch: int = EPOCH) -> m.Status:
    me = m.ConnectedFrontend(ME.hex(), 1, 0, 0)
    return m.Status(epoch, 1, "m", "cpu", "float32", state, last_step_age_s=age, frontends=(me,))


class Silent(Listener):
    """A listener that ignores everything except connections."""

    def connected(self, connection: WorkerConnection) -> None: ...
    def connection_lost(self, connection: WorkerConnection) -> None: ...


async def test_state_follows_what_the_worker_reports() -> None:
    connection = connected(Silent(), {})
    connection.welcome, connection.epoch = None, NO_EPOCH
    seen = [connection.state]
    for state in (WorkerState.DOWNLOADING, WorkerState.LOADING, WorkerState.READY):
        connection._on_event(status(state))
        seen.append(connection.state)
    connection._on_event(m.Welcome(connection._nonce, EPOCH, 1, "m", "", m.Limits(100, 100, ())))
    seen.append(connection.state)
    connection._on_event(status(age=61.0))
    seen.append(connection.state)
    for state in (WorkerState.DRAINING, WorkerState.FAILED):
        connection._on_event(status(state))
        seen.append(connection.state)
    C = ConnectionState
    assert seen == [C.CONNECTING, C.LOADING, C.LOADING, C.HANDSHAKE, C.READY, C.STALLED, C.DRAINING, C.FAILED]


async def test_state_of_a_worker_that_may_not_be_used() -> None:
    connection = connected(Silent(), {})
    connection._on_event(status())
    assert connection.state is ConnectionState.READY and connection.readiness.ready
    connection.leaving = True
    assert connection.state is ConnectionState.LEAVING
    connection.incompatible = "another model"
    assert connection.state is ConnectionState.INCOMPATIBLE
    assert connection.readiness == not_ready("another model")


async def test_silence_loses_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connected(Silent(), {})
    connection._on_event(status())
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + SILENCE_S + 0.1)
    connection.tick(time.monotonic())
    assert connection.welcome is None and connection.state is ConnectionState.LOST


async def test_repr_shows_address_state_epoch_and_streams() -> None:
    connection = connected(Silent(), {1: 5, 2: 5})
    connection._on_event(status())
    assert repr(connection) == "<WorkerConnection [w, READY, epoch 3, 2 streams]>"
