"""A worker of a simulated fleet: the real scheduler over its own pages, with a cost model instead of a device."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.simulate.cost import CostModel
from bench.simulate.replay import GENERATED_ID, build
from shared.config.worker import WorkerConfig
from shared.messages import (
    CachedPrefixes,
    ConnectedFrontend,
    KVUsage,
    Pages,
    Sampling,
    Status,
    Submit,
    WorkerState,
)
from worker.engine.kv_events import PageJournal
from worker.engine.prefix_report import PrefixReport
from worker.scheduler.queue import Refused
from worker.scheduler.sequence import Plan, PrefixState, RequestStats, Sequence

POOL_TOKENS = 40_000  # tokens that a worker's K/V pool holds
PROMPT_ONLY = Sampling(1, temperature=0.0, ignore_eos=True)  # a prefill worker's: what it samples is dropped


@dataclass(eq=False)
class SimulatedStream:
    """A running request, with the attributes that a router reads.

    lost_at: when its worker died; None once resumed. at_helper: whether it is at a prefill worker. tried: whether it
    was at one. computed: whether that one has computed the prompt
    """

    submit: Submit
    prompt: list[int]
    arrived: float
    worker: int = 0
    frontend: int = 0
    output: list[int] = field(default_factory=list)
    lost_at: float | None = None
    token_at: float | None = None  # when its last token came
    at_helper: bool = False
    tried: bool = False
    computed: bool = False


class SimulatedWorker:
    """A worker with a real scheduler. computing: the plan of the current step, if any"""

    def __init__(self, index: int, settings: WorkerConfig, cost: CostModel, frontends: int) -> None:
        self.index = index
        self.scheduler, self.pool = build(settings, POOL_TOKENS // settings.page_size)
        self.streams: dict[int, SimulatedStream] = {}
        self.computing: Plan | None = None
        self.journal: PageJournal | None = None  # set if the worker publishes K/V events
        self.report: PrefixReport | None = None
        self._cost = cost
        self._frontends = tuple(ConnectedFrontend(f"{n:032x}", 4000 + n, 10, 1000) for n in range(frontends))

    def publish_events(self) -> None:
        self.journal = PageJournal.of(self.scheduler.state.paging)

    def report_prefixes(self) -> None:
        state = self.scheduler.state
        self.report = PrefixReport.of(state.paging, state.live)

    def submit(self, stream: SimulatedStream, now: float) -> bool:
        """Submits a stream, including the output that it already has. Returns False if the worker is full."""
        id, prompt = stream.submit.id, stream.prompt
        sampling = PROMPT_ONLY if stream.at_helper else stream.submit.sampling
        if stream.computed:
            self._receive(prompt)
        sequence = Sequence(
            self._key(stream), prompt + stream.output, len(prompt), sampling, id,
            history=RequestStats(now), prefix=PrefixState(),
        )  # fmt: skip
        try:
            self.scheduler.submit(sequence, now)
        except Refused:
            return False
        self.streams[id] = stream
        return True

    def _receive(self, prompt: list[int]) -> None:
        """Puts the pages of a prompt that another worker has computed into the prefix cache, if there is room."""
        prefix, digests = self.scheduler.state.paging.prefix, list[bytes]()
        assert prefix is not None
        prefix.extend(digests, prompt, "", (len(prompt) - 1) // self.pool.page_size)
        missing = digests[len(self.pool.find_run(digests)) :]
        pages = self.pool.acquire(len(missing)) or []
        for page, digest in zip(pages, missing, strict=False):
            self.pool.publish(page, digest)
        self.pool.release(pages)

    def abort(self, stream: SimulatedStream) -> None:
        del self.streams[stream.submit.id]
        self.scheduler.abort(self._key(stream))

    @staticmethod
    def _key(stream: SimulatedStream) -> tuple[bytes, int]:
        return b"%04d" % stream.frontend, stream.submit.id

    def begin(self, now: float) -> float | None:
        """Begins a step. Returns the time at which the step ends; None if there is nothing to compute now."""
        plan = self.scheduler.plan(now)
        while not plan and plan.preempted:
            plan = self.scheduler.plan(now)
        if not plan:
            return None
        self.scheduler.launched(plan)
        self.computing = plan
        return now + self._cost.of(plan)

    def end(self, now: float) -> Iterator[tuple[SimulatedStream, int, bool]]:
        """Ends the step. Yields each stream that got tokens, the number of tokens, and whether the stream has ended."""
        plan, self.computing = self.computing, None
        assert plan is not None
        for update in self.scheduler.update(plan, [GENERATED_ID] * len(plan.sampling), now):
            id = update.sequence.key[1]
            if id in self.streams:  # the stream was not aborted during the step
                ended = update.outcome is not None
                stream = self.streams.pop(id) if ended else self.streams[id]
                yield stream, len(update.tokens), ended

    def status(self) -> Status:
        state, pages = self.scheduler.status, self.pool.counts()
        return Status(
            1, 4711, "m", "cpu", "bfloat16", WorkerState.READY, 1.0, 1000, 4096, 0.01,
            state.running, state.waiting, state.waiting_tokens,
            Pages(pages.free, pages.cached, pages.owned, pages.total), state.prefix_queries, state.prefix_hits,
            frontends=self._frontends, kernels="c", kv_cache=(KVUsage("full", pages.owned, pages.total, 1 << 30),),
            expected_tokens=self.scheduler.state.expected_tokens,
            prefixes=CachedPrefixes() if self.report is None else self.report.take(),
        )  # fmt: skip
