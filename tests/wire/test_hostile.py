"""A worker with a hostile frontend that has a valid key: it continues to serve others, at a proportionate cost.

Every request is well-typed, so the decoder accepts or refuses it.
"""

import contextlib
import math
import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import messages as m
from shared.wire import decode_event, decode_request, encode, pack_u32
from tests.patience import PATIENCE_S
from tests.wire.harness import VOCAB, FakeRunner, Worker, expected
from worker.engine.transport import MAX_INBOX, FrontendGone

ME, OTHER = b"mallory!", b"honest-1"
INTS = st.one_of(
    st.integers(-3, 40), st.sampled_from([VOCAB - 1, VOCAB, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 2**64 - 1])
)
FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1e-300, 1e300, math.inf, -math.inf, math.nan, -1.0]), st.floats(0, 2)
)
TEXTS = st.sampled_from(["", "\0", "x", "é" * 5000])
IDS = st.one_of(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40).map(pack_u32), st.binary(max_size=9))
SAMPLING = st.builds(
    m.Sampling, INTS, FLOATS, FLOATS, INTS, FLOATS, FLOATS, FLOATS, FLOATS, st.none() | INTS, INTS,
    st.lists(INTS, max_size=4).map(tuple), st.booleans(), st.lists(st.tuples(INTS, FLOATS), max_size=3).map(tuple),
    st.none() | INTS, st.booleans(), TEXTS,
)  # fmt: skip
SUBMIT = st.builds(m.Submit, INTS, IDS, SAMPLING, st.just(b"") | IDS, TEXTS, INTS, INTS, INTS, st.just(0) | INTS, TEXTS)
REQUESTS = st.one_of(
    SUBMIT, SUBMIT,
    st.builds(m.Abort, st.lists(INTS, max_size=5).map(tuple)), st.builds(m.Resync, INTS, INTS),
    st.builds(m.Lease, INTS), st.builds(m.Hello, INTS, INTS, INTS, TEXTS),
)  # fmt: skip
SOUND = m.Sampling(5, seed=1)


def passed(requests: list[m.Request]) -> list[m.Request]:
    """Returns the requests that the decoder accepts."""
    through = []
    for request in requests:
        try:
            through.append(decode_request(encode(request)))
        except msgspec.ValidationError:
            continue
    return through


@dataclass
class Ears:
    """Replaces a Link: decodes the worker's events, as a frontend does."""

    inbox: deque[tuple[bytes, m.Request | FrontendGone]] = field(default_factory=deque)
    told: dict[bytes, list[m.Step]] = field(default_factory=lambda: {ME: [], OTHER: []})
    turned: float = 0.0

    def publish(self, topic: bytes, step: m.Step) -> None:
        event = decode_event(encode(step))
        assert isinstance(event, m.Step)
        self.told.setdefault(topic, []).append(event)

    def flush(self) -> None: ...
    def refresh(self) -> None: ...
    def progress(self) -> None: ...


class Bench:
    """A worker's loop with its request table and scheduler; the test runs each iteration."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.ears = worker, Ears()
        worker.kill()  # ends its threads; its other parts stay
        worker.loop._server = self.ears  # type: ignore[assignment]

    @property
    def told(self) -> dict[bytes, list[m.Step]]:
        return self.ears.told

    def say(self, sender: bytes, *requests: m.Request | FrontendGone) -> float:
        """Sends requests and runs an iteration. Returns the seconds that it took."""
        self.ears.inbox.extend((sender, request) for request in requests)
        begun = time.perf_counter()
        self.worker.loop.iterate()
        return time.perf_counter() - begun

    def finish(self) -> None:
        for _ in range(3000):
            if not self.worker.loop.iterate():
                return
        raise AssertionError("it never ends")

    def ends(self, topic: bytes) -> list[m.End]:
        return [end for step in self.told[topic] for end in step.ends]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    with Worker(tmp_path) as worker:
        return Bench(worker)


@given(st.lists(REQUESTS, max_size=12))
@settings(max_examples=150)
def test_hostile_requests_harm_neither_worker_nor_other_frontends(requests: list[m.Request]) -> None:
    bench = BENCH[0]
    bench.say(OTHER, m.Submit(7, pack_u32([5, 6, 7]), SOUND))
    bench.say(ME, *(one for one in passed(requests) if not isinstance(one, m.Hello | m.Lease)))
    bench.say(ME, m.Abort((7,)), m.Resync(7, 0))  # ids of another frontend's requests
    bench.finish()
    bench.say(ME, FrontendGone())
    bench.worker.scheduler.check()
    assert [end.outcome for end in bench.ends(OTHER)] == [m.Outcome.LENGTH]
    bench.say(OTHER, m.Resync(7, 0))
    assert bench.told[OTHER][-1].tokens == pack_u32(expected([5, 6, 7], 5))
    bench.say(OTHER, FrontendGone())
    bench.told[OTHER].clear()


BENCH: list[Bench] = []


@pytest.fixture(autouse=True, scope="module")
def _one_bench(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Worker(tmp_path_factory.mktemp("w")) as worker:
        BENCH[:] = [Bench(worker)]


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_decoders_raise_one_error(data: bytes) -> None:
    for decode in (decode_request, decode_event):
        with contextlib.suppress(msgspec.DecodeError):
            decode(data)


@given(REQUESTS, st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=150)
def test_corrupted_frame_is_a_request_or_one_error(request: m.Request, at: int, byte: int) -> None:
    frame = bytearray(encode(request))
    frame[at % len(frame)] = byte
    with contextlib.suppress(msgspec.DecodeError):
        decode_request(bytes(frame))


def test_endless_nesting_is_the_same_error() -> None:
    frame = bytearray(encode(m.Abort((1,))))
    frame[0] += 1  # one more field, which the current decoder skips
    for nested in (b"\x91" * 1_000_000, b"\x81\xa1a" * 1_000_000):
        with pytest.raises(msgspec.DecodeError):
            decode_request(bytes(frame) + nested)


LIMIT_S = 10.0  # limit on work that takes milliseconds, but would take minutes if it were done for each item
MANY = tuple(range(1_000_000))


@pytest.mark.parametrize(
    "request_",
    [
        m.Submit(1, bytes(12 << 20), SOUND),
        m.Submit(1, pack_u32([1]), SOUND, generated=bytes(12 << 20)),
        m.Submit(1, pack_u32([1]), m.Sampling(5, stop_token_ids=MANY[:100_000])),
        m.Submit(1, pack_u32([1]), m.Sampling(5, logit_bias=tuple((id % VOCAB, 1.0) for id in MANY))),
        m.Submit(1, pack_u32([1]), m.Sampling(5, logprobs=2**62)),
        m.Submit(1, pack_u32([1]), m.Sampling(2**62)),
        m.Submit(1, pack_u32([1]), SOUND, cache_salt="s" * (8 << 20)),
        m.Submit(1, pack_u32([1]), SOUND, tenant="o" * (8 << 20)),
        m.Abort(MANY),
    ],
    ids=["prompt", "generated", "stop ids", "biases", "logprobs", "max tokens", "salt", "owner", "aborts"],
)  # fmt: skip
def test_large_requests_cost_little(bench: Bench, request_: m.Request) -> None:
    assert bench.say(ME, request_) < LIMIT_S
    bench.finish()
    bench.worker.scheduler.check()


def test_repeated_resync_is_answered_once_an_iteration(bench: Bench) -> None:
    bench.say(ME, m.Submit(1, pack_u32([1]), m.Sampling(1500)))
    bench.finish()
    bench.told[ME].clear()
    assert bench.say(ME, *[m.Resync(1, 0)] * 10_000, m.Resync(1, 2**32 - 1), m.Resync(9, 2**32 - 1)) < LIMIT_S
    iterations = 1
    while bench.ears.inbox:  # an iteration on a slow machine does not read all of them
        assert bench.say(ME) < LIMIT_S
        iterations += 1
    steps = bench.told[ME]
    assert len(steps) <= iterations < 100 and len(steps[0].tokens) == 4 * 1500 and len(steps[0].ends) == 1
    assert all(len(step.tokens) <= 4 * 1500 for step in steps) and steps[-1].unknown == (9,)


def test_flood_does_not_stop_the_loop(tmp_path: Path) -> None:
    """A sender floods the worker with more messages than it can read. Another sender is served meanwhile."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Worker(tmp_path, runner=FakeRunner(delay=0.001)) as worker:
        sock = context.socket(zmq.DEALER)
        sock.setsockopt(zmq.IDENTITY, ME)
        sock.connect(worker.wire.requests)
        sock.send(encode(m.Hello(1, os.getpid())))
        wait(lambda: ME in worker.server._peers)
        sock.send(encode(m.Submit(1, pack_u32([1]), m.Sampling(400))))
        frame = encode(m.Resync(99, 0))
        for _ in range(30_000):
            sock.send(frame)
        wait(lambda: not worker.scheduler.has_work and not worker.server.inbox)
        assert len(worker.server.inbox) <= MAX_INBOX
        worker.scheduler.check()
        sock.close(linger=0)
    context.term()


def test_hello_with_a_reserved_id_is_dropped(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Worker(tmp_path) as worker:
        for identity in (m.BROADCAST, b"short", b"long" * 20):
            sock = context.socket(zmq.DEALER)
            sock.setsockopt(zmq.IDENTITY, identity)
            sock.connect(worker.wire.requests)
            sock.send(encode(m.Hello(1, os.getpid())))
            sock.close(linger=1000)
        wait(lambda: worker.server.counters.garbage >= 2)  # ZeroMQ itself may refuse the first frame
        assert worker.server._peers == {}
    context.term()


def wait(true: object, timeout: float = PATIENCE_S) -> None:
    assert callable(true)
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_inbox_that_grows_while_it_is_read_is_read_to_its_old_end(bench: Bench) -> None:
    class Endless(deque[tuple[bytes, m.Request]]):
        def popleft(self) -> tuple[bytes, m.Request]:
            self.append((ME, m.Resync(1, 0)))
            return super().popleft()

    inbox = Endless([(ME, m.Resync(1, 0))] * 3)
    bench.worker.request_table.receive(inbox, 0.0)  # type: ignore[arg-type]
    assert len(inbox) == 3
