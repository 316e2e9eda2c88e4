"""Runs traffic through the real scheduler and page pool in virtual time: no tensors, no sockets, no waiting.

The loop has the steps of worker/engine/loop.py (receive, plan, compute, update), but instead of computing, it asks a
cost model for the time. Token ids are invented, and a sequence ends at its max_tokens. The same traffic gives exactly
the same result.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from bench.simulate.cost import CostModel
from bench.simulate.traffic import Arrival, Traffic
from shared.config.worker import WorkerConfig
from shared.messages import Sampling
from worker.kv_cache.pages import PagePool
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.queue import QueueFull, Refused
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Plan, RequestStats, Sequence, SequenceUpdate

GENERATED_ID = 1  # the id of every generated token
DEFAULT_SEQ_LEN = 4096
FRONTEND = b"simulate"


class Stuck(RuntimeError):
    """The scheduler has work but neither plans a step nor says when to call it again."""


@dataclass(slots=True)
class Request:
    """The result of one request. Times are in seconds since the start. stamps: the time of each output token"""

    sent: float
    prompt_tokens: int
    stamps: list[float] = field(default_factory=list)
    done: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0
    refused: str = ""  # why the request was not accepted; empty if it was
    full: bool = False  # whether the queue was full (503); any other refusal is the request's own fault

    @property
    def ttft(self) -> float:
        return self.stamps[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)]


class Sample(NamedTuple):
    """One step, or one interval without a step: when it began, how long it took, and the state of queue and pool."""

    at: float
    seconds: float
    waiting: int
    running: int
    batch: int  # sequences in the step; 0 if nothing was computed
    tokens: int  # tokens in the step
    owned: int
    cached: int
    free: int
    preempted: int  # number of preempted sequences since the start


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay. requests: in the order in which they were sent; timeline: samples without gaps."""

    requests: list[Request]
    timeline: list[Sample]
    end: float  # time of the end in seconds
    preemptions: int

    @property
    def steps(self) -> int:
        return sum(sample.batch > 0 for sample in self.timeline)

    @property
    def refused(self) -> int:
        """The number of requests that were answered with 503 because the queue was full."""
        return sum(request.full for request in self.requests)

    @property
    def finished(self) -> list[Request]:
        return [request for request in self.requests if not request.refused]


def build(
    worker: WorkerConfig,
    pages: int,
    max_seq_len: int = 0,
    *,
    window: int = 0,
    window_pages: int = 0,
    state_slots: int = 0,
) -> tuple[Scheduler, PagePool]:
    """Returns a scheduler with these settings, and its pool of `pages` pages of `worker.page_size` tokens.

    window: if it is not 0, some layers have this sliding window and their own pool of `window_pages` pages.
    state_slots: if it is not 0, some layers are recurrent, with this number of slots for their states.

    With --kv-cache-backend contiguous the same memory is divided into pages of `max_seq_len` tokens (4,096 if 0).
    Steps are replayed one after another, so the stages of --pipeline-parallel-size, which would compute several steps
    at a time, count as one.

    Raises ValueError if the memory is too small for one such page, or the slots for the states of one sequence.
    """
    worker = replace(worker, pipeline_parallel_size=1)
    max_seq_len = max_seq_len or DEFAULT_SEQ_LEN
    size = worker.page_size
    if worker.kv_cache_backend == "contiguous":
        pages, size = pages * size // max_seq_len, max_seq_len
    if pages < 1:
        raise ValueError(f"the K/V pool does not hold one sequence of {max_seq_len} tokens")
    pool = PagePool(pages + 1, size)
    pools = [pool, PagePool(window_pages + 1, size, window)] if window else [pool]
    slots = PagePool(state_slots + 1, size) if state_slots else None
    return Scheduler(SchedulerConfig.of(worker, max_seq_len, frozenset()), pools, slots), pool


def replay(
    traffic: Traffic,
    scheduler: Scheduler,
    pool: PagePool,
    cost: CostModel,
    on_step: Callable[[Sample], None] = lambda sample: None,
) -> Replay:
    """Runs all of `traffic` through an idle `scheduler` over `pool`; `on_step` is called after each sample.

    Raises Stuck if the scheduler has work but plans nothing.
    """
    run = _Run(traffic, scheduler, pool, cost)
    while run.busy:
        sample = run.step()
        if sample is not None:
            on_step(sample)
    return Replay(list(run.requests.values()), run.timeline, run.now, scheduler.status.preemptions)


class _Run:
    def __init__(self, traffic: Traffic, scheduler: Scheduler, pool: PagePool, cost: CostModel) -> None:
        self.now = 0.0
        self.requests: dict[int, Request] = {}
        self.timeline: list[Sample] = []
        self._arrivals = deque(sorted(traffic.arrivals, key=lambda arrival: arrival.at))
        self._sequential = traffic.sequential
        self._scheduler = scheduler
        self._pool = pool
        self._cost = cost
        self._last_end = 0.0  # when the latest request ended

    @property
    def busy(self) -> bool:
        return bool(self._arrivals) or self._scheduler.has_work

    def step(self) -> Sample | None:
        """Runs one step, or moves the clock to the next time at which work may be available."""
        self._receive()
        if not self.busy:  # nothing is left to do, because the last requests were refused
            return None
        plan = self._scheduler.plan(self.now)
        if plan:
            return self._compute(plan)
        return None if plan.preempted else self._wait()  # the preempted pages are free for the next plan

    def _receive(self) -> None:
        while self._arrivals and self._next_sent() <= self.now:
            sent = self._next_sent()
            self._submit(self._arrivals.popleft(), sent)

    def _next_sent(self) -> float:
        """Returns the time at which the next request is sent; inf if none is left or another request must end first."""
        if not self._arrivals or (self._sequential and self._scheduler.has_work):
            return inf
        return max(self._arrivals[0].at, self._last_end) if self._sequential else self._arrivals[0].at

    def _submit(self, arrival: Arrival, sent: float) -> None:
        id = len(self.requests)
        request = self.requests[id] = Request(sent, len(arrival.prompt))
        sampling = Sampling(arrival.max_tokens, temperature=0.0, ignore_eos=True)
        sequence = Sequence(
            (FRONTEND, id), list(arrival.prompt), len(arrival.prompt), sampling, id, history=RequestStats(sent)
        )
        try:
            self._scheduler.submit(sequence, self.now)
        except Refused as refused:
            request.refused, request.full = str(refused), isinstance(refused, QueueFull)
            request.done = self._last_end = self.now

    def _compute(self, plan: Plan) -> Sample:
        sample = self._sample(plan, self._cost.of(plan))
        self.now += sample.seconds
        self._scheduler.launched(plan)
        for update in self._scheduler.update(plan, [GENERATED_ID] * len(plan.sampling), self.now):
            self._report(update)
        return sample

    def _report(self, update: SequenceUpdate) -> None:
        sequence = update.sequence
        request = self.requests[sequence.key[1]]
        request.stamps += [self.now] * len(update.tokens)
        if update.outcome is not None:
            request.done = self._last_end = self.now
            request.cached_tokens, request.preemptions = sequence.prefix.cached_tokens, sequence.history.preemptions

    def _wait(self) -> Sample:
        until = min(self._next_sent(), self._scheduler.next_wakeup(self.now))
        if not self.now < until < inf:
            status = self._scheduler.status
            raise Stuck(f"{status.waiting} wait, {status.running} run, and nothing is planned")
        sample = self._sample(Plan(), until - self.now)
        self.now = until
        return sample

    def _sample(self, plan: Plan, seconds: float) -> Sample:
        scheduler, pages = self._scheduler.status, self._pool.counts()
        sample = Sample(
            self.now, seconds, scheduler.waiting, scheduler.running, len(plan.chunks), plan.tokens,
            pages.owned, pages.cached, pages.free, scheduler.preemptions,
        )  # fmt: skip
        self.timeline.append(sample)
        return sample
