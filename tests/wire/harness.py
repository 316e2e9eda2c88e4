"""A worker without a model, in a thread: real sockets, request table, scheduler and loop.

The next id is a hash of all ids before it, so that any mistake in order, offset or resumption changes the tokens.
"""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from frontend.workers.pool import WorkerPool
from frontend.workers.stream import Batch, Stream
from shared import messages as m
from shared.config.settings import WireConfig
from shared.messages import Limits, Outcome, Role, Sampling, Status, WorkerState
from tests.patience import PATIENCE_S
from worker.engine.loop import Loop
from worker.engine.metrics import Metrics, Stats
from worker.engine.prefix_report import PrefixReport
from worker.engine.requests import RequestTable
from worker.engine.transport import Identity, WireServer
from worker.kv_cache.pages import PagePool
from worker.model_runner.step import StepOutput
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Plan, Sequence

VOCAB = 1000


def next_id(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % VOCAB


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_id(tokens))
    return tokens[len(prompt) :]


@dataclass(frozen=True, slots=True)
class Done:
    """A step that is complete as soon as it is launched."""

    plan: Plan
    sampled: StepOutput
    steps_behind: int = 0

    def read(self) -> StepOutput:
        return self.sampled


@dataclass(slots=True)
class FakeRunner:
    """A runner without a model. trouble: called with each sequence of a step, and may raise"""

    delay: float = 0.0
    trouble: Callable[[Sequence], None] = lambda sequence: None

    def check_device(self) -> None: ...

    def launch(self, plan: Plan, before: Done | None) -> Done:
        if self.delay:
            time.sleep(self.delay)
        for chunk in plan.chunks:
            self.trouble(chunk.sequence)
        return Done(plan, StepOutput([next_id(chunk.sequence.tokens) for chunk in plan.sampling]))


@dataclass
class Worker:
    """`with Worker(folder) as worker:` serves. `kill()` ends the worker without a message, as a crash does."""

    folder: Path
    epoch: int = 1
    runner: FakeRunner = field(default_factory=FakeRunner)
    max_waiting: int = 64
    max_batch: int = 32
    pages: int = 257
    lease_timeout: float = 10.0
    over: WireConfig | None = None  # the worker's addresses; None: sockets in the folder
    model: str = "fake"
    max_seq_len: int = 2048
    tokenizer_hash: str = "hash"
    fingerprint: str = "fp_worker"
    role: Role = Role.BOTH
    kv_space: str = "space"
    kv_store_tokens: int = 1 << 20
    usable: bool = True  # whether its K/V store works

    @property
    def wire(self) -> WireConfig:
        return self.over or WireConfig(run_dir=str(self.folder))

    def __enter__(self) -> "Worker":
        limits = Limits(self.max_seq_len, VOCAB, (), 0, self.max_batch + self.max_waiting, self.max_batch)
        self.pool = PagePool(self.pages, 16)
        config = SchedulerConfig(max_seq_len=2048, max_batch_size=self.max_batch, max_waiting_requests=self.max_waiting)
        self.scheduler = Scheduler(config, [self.pool])
        stats, self.metrics = Stats(), Metrics(model_name=self.model)
        self.request_table = RequestTable(self.scheduler, stats, self.metrics, vocab_size=VOCAB, seeds=random.Random(0))
        self.server = WireServer(
            self.wire,
            Identity(
                self.epoch,
                self.model,
                self.tokenizer_hash,
                limits,
                self.fingerprint,
                self.kv_space,
                self.kv_store_tokens,
            ),
            self.lease_timeout,
            self.status,
        )
        state = self.scheduler.state
        self.server.prefixes = PrefixReport.of(state.paging, state.live).take
        self.server.start()
        self.stopped = False
        self.loop = Loop(self.scheduler, self.runner, self.request_table, self.server, stats, self.metrics)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self.loop.run, args=(lambda: self.stopped,))
        self.thread.start()
        return self

    def status(self) -> Status:
        return Status(
            self.epoch, 1, self.model, "cpu", "float32",
            WorkerState.DRAINING if self.request_table.draining else WorkerState.READY,
            running=self.scheduler.status.running, waiting=self.scheduler.status.waiting,
            pages=self.pool.counts(), prefix_cache_reset=self.scheduler.status.prefix_cache_reset,
            expected_tokens=self.scheduler.state.expected_tokens, role=self.role,
            kv_store=(m.KVStoreTier("kv", self.usable),),
        )  # fmt: skip

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        if not self.stopped:
            self.stopped = True
            self.thread.join()
            self.server.close()

    def end(self) -> None:
        """Ends the worker as after a drain that took too long: every request gets an End."""
        self.stopped = True
        self.thread.join()
        self.request_table.end_all(Outcome.SHUTDOWN, time.monotonic(), "no more time")
        self.request_table.publish(self.server, time.monotonic())
        self.server.close()


def sampling(max_tokens: int, **options: object) -> Sampling:
    return Sampling(max_tokens, **options)  # type: ignore[arg-type]


async def next_batch(stream: Stream) -> Batch:
    """Waits until the stream has deltas, and returns them."""
    arrived = asyncio.Event()
    stream.on_fresh = arrived.set
    while not stream.fresh:
        await arrived.wait()
        arrived.clear()
    return stream.gather()


PROMPT = [5, 6, 7]


@asynccontextmanager
async def linked(wire: WireConfig, **options: float) -> AsyncIterator[WorkerPool]:
    """A ready pool with one worker."""
    pool = WorkerPool(wire, **options)
    await pool.start()
    try:
        await until(lambda: pool.membership.readiness.ready)
        yield pool
    finally:
        await pool.close()


async def until(true: Callable[[], bool], timeout: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "timed out"
        await asyncio.sleep(0.005)


async def whole(stream: Stream) -> tuple[list[int], m.End]:
    tokens: list[int] = []
    while True:
        batch = await next_batch(stream)
        assert batch.start == len(tokens)
        tokens += batch.tokens
        if batch.end is not None:
            return tokens, batch.end
