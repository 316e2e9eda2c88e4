"""One fleet in simulated time: arrivals, steps of workers, late statuses, deaths and restarts."""

import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import ceil, inf

from bench.simulate.cost import CostModel
from bench.simulate.fleet_picker import FleetPicker
from bench.simulate.fleet_routers import FleetRouter
from bench.simulate.fleet_workers import SimulatedStream, SimulatedWorker
from bench.simulate.fleet_workloads import Arrival, Deaths
from bench.simulate.replay import GENERATED_ID
from frontend.workers.remote_prefill import TOKENS, RecentPrompts
from frontend.workers.routing import HOMES
from shared.config.worker import WorkerConfig, with_default_sizes
from shared.messages import Sampling, Status, Submit
from shared.wire import encode, pack_u32

STATUS_S = 0.2
RESTART_S = 2.0  # from the death of a worker or frontend until it serves again
NO_DEATHS = Deaths([], [])


@dataclass
class Result:
    """The result of a run.

    choices: CPU seconds in which frontends chose workers. learning: CPU seconds in which they read workers' statuses.
    """

    requests: int = 0
    refused: int = 0
    answered: int = 0
    resumed: int = 0
    broken: int = 0
    choices: float = 0.0
    learning: float = 0.0
    ttft: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # seconds between two tokens of a stream, without pauses
    remote: int = 0  # prompts that prefill workers have computed
    queries: int = 0
    hits: int = 0
    statuses: int = 0
    status_bytes: int = 0  # bytes of all statuses
    rounds: int = 0  # rounds in which every worker sent its status

    @property
    def lost(self) -> int:
        return self.requests - self.refused - self.answered

    @staticmethod
    def quantile(values: list[float], share: float) -> float:
        """Returns the smallest value such that `share` of all values are at most as large; 0 if there are none."""
        ordered = sorted(values)
        return ordered[min(len(ordered) - 1, ceil(share * len(ordered)) - 1)] if ordered else 0.0


class Fleet:
    """The simulation of a fleet with a given number of workers."""

    def __init__(
        self, workers: int, frontends: int, cost: CostModel, seed: int = 0, *, routing: str = "reports",
        prefill: int = 0, transfer_s: float = 0.0,
    ) -> None:  # fmt: skip
        """prefill: how many of the workers compute long prompts, and nothing else. transfer_s: seconds until the K/V
        of a token of such a prompt is at the worker that generates

        routing: learnt (each frontend knows its own streams only), homes (frontends agree on the home workers of a
        prefix), reports (workers also report their cached prefixes) or picker (a gateway's picker chooses)"""
        self._settings = with_default_sizes(WorkerConfig(), on_gpu=False)
        self._cost, self._routing, self._draw = cost, routing, random.Random(seed)
        self._now = 0.0
        self._generating, self._transfer_s = range(workers - prefill), transfer_s
        self._picker: FleetPicker | None = None
        if routing == "picker":
            self._picker = FleetPicker(workers, lambda: self._now, self._settings.page_size)
        self.workers = [self._new_worker(index, frontends) for index in range(workers)]
        self.routers = [self._new_router() for _ in range(frontends)]
        self.prefill = range(workers - prefill, workers)
        self.helpers = [self._new_helper() for _ in range(frontends)]
        self._recent = [RecentPrompts() for _ in range(frontends)]  # prompts that a frontend's streams had
        self._moving: dict[SimulatedStream, None] = {}  # streams whose K/V is on its way
        self.result = Result()
        self._down: set[int] = set()  # workers that are dead now
        self._absent: set[int] = set()  # frontends that are dead now
        self._waiting: list[SimulatedStream] = []  # streams without a worker
        self._ids = count(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # (time, number that orders ties, action)
        self._event_ids = count()
        self._status_at = 0.0
        self._report()

    def _new_worker(self, index: int, frontends: int) -> SimulatedWorker:
        worker = SimulatedWorker(index, self._settings, self._cost, frontends)
        if self._picker is not None:
            worker.publish_events()
            self._picked(worker)
        if self._routing == "reports":
            worker.report_prefixes()
        return worker

    def _picked(self, worker: SimulatedWorker) -> None:
        """Passes a worker's K/V events to the picker, if there is one."""
        if self._picker is not None and worker.journal is not None:
            self._picker.index.take(worker.index, worker.journal.take())

    def _new_router(self) -> FleetRouter:
        if self._picker is not None:
            return self._picker
        return FleetRouter(self._generating, lambda: self._now, 0 if self._routing == "learnt" else HOMES)

    def _new_helper(self) -> FleetRouter:
        """Returns a frontend's router among prefill workers."""
        return FleetRouter(self.prefill, lambda: self._now)

    def run(self, arrivals: Iterator[Arrival], deaths: Deaths = NO_DEATHS) -> Result:
        """Runs until every request has ended."""
        for at, index in deaths.workers:
            self._at(at, self._worker_dies, index)
        for at, index in deaths.frontends:
            self._at(at, self._frontend_dies, index)
        coming = deque(arrivals)
        while coming or self._events or self._waiting:
            at = min(coming[0][0] if coming else inf, self._events[0][0] if self._events else inf)
            self._now = at = min(at, self._status_at + STATUS_S) if self._waiting else at
            while self._status_at + STATUS_S <= at:
                self._status_at += STATUS_S
                self._report()
            if coming and coming[0][0] <= at:
                self._arrive(*coming.popleft())
            elif self._events and self._events[0][0] <= at:
                heapq.heappop(self._events)[2]()
        for worker in self.workers:
            self._count_hits(worker)
        return self.result

    def _at(self, when: float, what: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._event_ids), lambda: what(*arguments)))

    def _report(self) -> None:
        statuses: list[Status | None] = [
            None if worker.index in self._down else worker.status() for worker in self.workers
        ]
        self.result.rounds += 1
        self.result.statuses += len(self.workers) - len(self._down)
        self.result.status_bytes += sum(len(encode(status)) for status in statuses if status)
        begun = time.thread_time()
        for router in self._each_router():
            router.heard(statuses)
        self.result.learning += time.thread_time() - begun
        waiting, self._waiting = self._waiting, []
        for stream in waiting:
            self._place(stream)

    def _each_router(self) -> list[FleetRouter]:
        return [*self.routers, *self.helpers] if self._picker is None else [self._picker]

    def _router_of(self, stream: SimulatedStream) -> FleetRouter:
        return (self.helpers if stream.at_helper else self.routers)[stream.frontend]

    # requests

    def _arrive(self, now: float, prompt: list[int], output: int) -> None:
        self.result.requests += 1
        self._ask(prompt, output, now)

    def _ask(self, prompt: list[int], output: int, arrived: float) -> None:
        sampling = Sampling(output, temperature=0.0, ignore_eos=True)
        stream = SimulatedStream(Submit(next(self._ids), pack_u32(prompt), sampling), prompt, arrived)
        present = [n for n in range(len(self.routers)) if n not in self._absent]
        if not present:
            self._at(self._now + STATUS_S, self._ask, prompt, output, arrived)  # no frontend is up: the client retries
            return
        stream.frontend = self._draw.choice(present)
        self._place(stream)

    def _place(self, stream: SimulatedStream) -> None:
        begun = time.thread_time()
        stream.at_helper = self._is_for_helper(stream)
        if not stream.at_helper and self.prefill:
            self._recent[stream.frontend].remember(stream.submit.prompt, "")
        chosen = self._router_of(stream).choose(stream)
        self.result.choices += time.thread_time() - begun
        if chosen is None:
            self._waiting.append(stream)
            return
        stream.worker = chosen
        worker = self.workers[chosen]
        if worker.submit(stream, self._now):
            if worker.computing is None:
                self._begin(worker)
            return
        self._router_of(stream).ended(stream)
        if stream.at_helper:
            self._place(stream)  # now at a worker that generates, which computes the prompt
        elif stream.lost_at is None:
            self.result.refused += 1
        else:  # a stream that was admitted before its worker died waits for another worker
            self._waiting.append(stream)

    def _is_for_helper(self, stream: SimulatedStream) -> bool:
        """Whether a prefill worker should compute the prompt, as frontend/workers/remote_prefill.py decides it."""
        if stream.tried or stream.output or self._down.issuperset(self.prefill):
            return False
        known = max(
            self._recent[stream.frontend].longest(stream.submit.prompt, ""),
            self.routers[stream.frontend].cached(stream),
        )
        stream.tried = len(stream.prompt) - known >= TOKENS
        return stream.tried

    # steps

    def _begin(self, worker: SimulatedWorker) -> None:
        if (end := worker.begin(self._now)) is not None:
            self._at(end, self._step_ends, worker)

    def _step_ends(self, worker: SimulatedWorker) -> None:
        if self.workers[worker.index] is not worker:
            return  # the worker died in this step
        for stream, tokens, ended in worker.end(self._now):
            if stream.at_helper:
                if ended:
                    self._move(stream)
                continue
            self._took(stream, tokens)
            if ended:
                self.result.answered += 1
                self.routers[stream.frontend].ended(stream)
        self._picked(worker)
        self._begin(worker)

    def _move(self, stream: SimulatedStream) -> None:
        """Lets a stream whose prompt was computed go to a worker that generates, when the prompt's K/V is there."""
        self.result.remote += 1
        self.helpers[stream.frontend].ended(stream)
        stream.at_helper, stream.computed = False, True
        self._moving[stream] = None
        self._at(self._now + self._transfer_s * len(stream.prompt), self._moved, stream)

    def _moved(self, stream: SimulatedStream) -> None:
        if stream in self._moving:  # its frontend lives
            del self._moving[stream]
            self._place(stream)

    def _took(self, stream: SimulatedStream, tokens: int) -> None:
        if tokens and not stream.output:
            self.result.ttft.append(self._now - stream.arrived)
        if tokens and stream.lost_at is not None:
            self.result.pauses.append(self._now - stream.lost_at)
            stream.lost_at = None
        elif tokens and stream.token_at is not None:
            self.result.gaps.append(self._now - stream.token_at)
        stream.token_at = self._now if tokens else stream.token_at
        stream.output += [GENERATED_ID] * tokens

    # deaths

    def _worker_dies(self, index: int) -> None:
        if index in self._down:
            return
        self._down.add(index)
        worker, self.workers[index] = self.workers[index], self._new_worker(index, len(self.routers))
        self._picked(self.workers[index])  # a worker's first event clears its predecessor's pages in the index
        self._count_hits(worker)
        streams = list(worker.streams.values())
        for stream in streams:
            self._router_of(stream).ended(stream)
        for router in self._each_router():
            router.down(index)
        self._at(self._now + RESTART_S, self._worker_returns, index)
        for stream in streams:
            self.result.resumed += 1
            stream.lost_at = self._now if stream.lost_at is None else stream.lost_at
            self._place(stream)

    def _worker_returns(self, index: int) -> None:
        self._down.discard(index)
        for router in self._each_router():
            router.up(index)

    def _frontend_dies(self, index: int) -> None:
        if index in self._absent:
            return
        self._absent.add(index)
        broken = [one for one in self._waiting if one.frontend == index]
        self._waiting = [one for one in self._waiting if one.frontend != index]
        broken += [one for one in self._moving if one.frontend == index]
        self._moving = {one: None for one in self._moving if one.frontend != index}
        for worker in self.workers:
            held = [one for one in worker.streams.values() if one.frontend == index]
            for stream in held:
                worker.abort(stream)
                self._router_of(stream).ended(stream)
            broken += held
        self.result.broken += len(broken)
        self.routers[index], self.helpers[index] = self._new_router(), self._new_helper()
        self._recent[index] = RecentPrompts()
        for down in self._down if self._picker is None else ():
            self.routers[index].down(down)
            self.helpers[index].down(down)
        self._at(self._now + RESTART_S, self._absent.discard, index)
        for stream in broken:
            self._ask(stream.prompt, stream.submit.sampling.max_tokens, stream.arrived)

    def _count_hits(self, worker: SimulatedWorker) -> None:
        self.result.queries += worker.scheduler.status.prefix_queries
        self.result.hits += worker.scheduler.status.prefix_hits
