"""Simulates a fleet: real schedulers of many workers, real routers of many frontends, and statuses that come late.

    python -m bench.simulate.fleet [--workers 1 10 100 1000] [--workload agents|chat|bursts] [--seconds 12]

It is a discrete simulation: a heap of arrivals and ends of steps. A request arrives at a random frontend, which chooses
a worker by what it knows: its own streams, and each worker's last status, which workers send every 0.2 s. The worker's
scheduler plans steps over its own pages, and a cost model says how long a step takes. Wires take no time, and nothing
fails. The table has, for each number of workers:

    µs a request     what a choice of a worker took a frontend on this machine (processor time)
    status kB/s      what the statuses of all workers are together, which every frontend decodes
    cached           the share of prompt tokens that came from prefix caches
    p50, p99 TTFT    the time to the first token (simulated)
"""

import argparse
import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import ceil, inf
from typing import Any

from bench.client.summary import aligned
from bench.simulate.cost import CostModel, load
from bench.simulate.fleet_routers import FleetRouter
from bench.simulate.replay import GENERATED_ID, build
from shared.arguments import positive_int
from shared.config import WorkerConfig
from shared.default_sizes import with_default_sizes
from shared.messages import ConnectedFrontend, KVUsage, Pages, Sampling, Status, Submit, WorkerState
from shared.wire.codec import encode, pack_u32
from worker.schedule.admission import Refused
from worker.schedule.records.history import History
from worker.schedule.records.shared_prefix import SharedPrefix
from worker.schedule.sequence import Plan, Sequence

STATUS_S = 0.2
FRONTENDS_FOR = 20  # workers for each frontend, at most 50 frontends
POOL_TOKENS = 40_000  # K/V of a worker
Arrival = tuple[float, list[int], int]  # when, prompt, most new tokens


@dataclass(frozen=True)
class Workload:
    """Requests with shared prefixes. rate: requests a second for each worker; burst: how many arrive together"""

    groups: float  # prefixes for each worker
    prefix: int  # tokens that all prompts of a group begin with
    tail: tuple[int, int]  # further tokens of a prompt
    output: int
    rate: float
    burst: int = 1

    def arrivals(self, workers: int, seconds: float, draw: random.Random) -> Iterator[Arrival]:
        groups = max(1, round(self.groups * workers))
        heads = [[draw.randrange(300, 32_000) for _ in range(self.prefix)] for _ in range(groups)]
        at = 0.0
        while (at := at + draw.expovariate(self.rate * workers / self.burst)) < seconds:
            for _ in range(self.burst):
                tail = [draw.randrange(300, 32_000) for _ in range(draw.randint(*self.tail))]
                yield at, draw.choice(heads) + tail, self.output


WORKLOADS = {
    "agents": Workload(groups=2, prefix=2048, tail=(50, 250), output=24, rate=0.9),
    "chat": Workload(groups=0.5, prefix=320, tail=(20, 400), output=48, rate=1.0),
    "bursts": Workload(groups=2, prefix=1024, tail=(50, 250), output=24, rate=0.9, burst=8),
}


@dataclass(eq=False)
class SimulatedStream:
    """What a router reads of a stream."""

    submit: Submit
    arrived: float
    worker: int = 0
    frontend: int = 0
    output: list[int] = field(default_factory=list)
    first: float = 0.0


class SimulatedWorker:
    """A real scheduler, and the step that it computes."""

    def __init__(self, index: int, settings: WorkerConfig, cost: CostModel, frontends: int) -> None:
        self.index = index
        self.scheduler, self.pool = build(settings, POOL_TOKENS // settings.page_size)
        self.streams: dict[int, SimulatedStream] = {}
        self.computing: Plan | None = None
        self._cost = cost
        self._frontends = tuple(ConnectedFrontend(f"{n:032x}", 4000 + n, 10, 1000) for n in range(frontends))

    def submit(self, id: int, stream: SimulatedStream, prompt: list[int], now: float) -> bool:
        sequence = Sequence(
            (b"%04d" % stream.frontend, id), prompt, len(prompt), stream.submit.sampling, id,
            history=History(now), prefix=SharedPrefix(),
        )  # fmt: skip
        try:
            self.scheduler.submit(sequence, now)
        except Refused:
            return False
        self.streams[id] = stream
        return True

    def begin(self, now: float) -> float | None:
        """Begins a step, and returns when it ends; None if there is nothing to compute now."""
        plan = self.scheduler.plan(now)
        while not plan and plan.preempted:
            plan = self.scheduler.plan(now)
        if not plan:
            return None
        self.scheduler.launched(plan)
        self.computing = plan
        return now + self._cost.of(plan)

    def end(self, now: float) -> Iterator[tuple[SimulatedStream, int, bool]]:
        """Ends the step. Yields streams that got tokens: how many, and whether they have ended."""
        plan, self.computing = self.computing, None
        assert plan is not None
        for update in self.scheduler.update(plan, [GENERATED_ID] * len(plan.sampling), now):
            id = update.sequence.key[1]
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
        )  # fmt: skip


@dataclass
class Result:
    """What happened. choices: seconds that frontends spent choosing"""

    requests: int = 0
    refused: int = 0
    choices: float = 0.0
    ttft: list[float] = field(default_factory=list)
    queries: int = 0
    hits: int = 0
    status_bytes: int = 0  # of one status of every worker


class Fleet:
    """The simulation of one number of workers."""

    def __init__(self, workers: int, frontends: int, cost: CostModel, seed: int = 0) -> None:
        settings = with_default_sizes(WorkerConfig(), on_gpu=False)
        self.workers = [SimulatedWorker(index, settings, cost, frontends) for index in range(workers)]
        self._now = 0.0
        self.routers = [FleetRouter(workers, lambda: self._now) for _ in range(frontends)]
        self.result = Result()
        self._draw = random.Random(seed)
        self._ids = count(1)
        self._ends: list[tuple[float, int]] = []  # of steps: when, which worker
        self._status_at = 0.0
        self._report()

    def run(self, arrivals: Iterator[Arrival]) -> Result:
        coming = deque(arrivals)
        while coming or self._ends:
            at = min(coming[0][0] if coming else inf, self._ends[0][0] if self._ends else inf)
            self._now = at
            while self._status_at + STATUS_S <= at:
                self._status_at += STATUS_S
                self._report()
            if coming and coming[0][0] <= at:
                self._arrive(*coming.popleft())
            else:
                self._step(*heapq.heappop(self._ends))
        for worker in self.workers:
            self.result.queries += worker.scheduler.status.prefix_queries
            self.result.hits += worker.scheduler.status.prefix_hits
        return self.result

    def _report(self) -> None:
        statuses = [worker.status() for worker in self.workers]
        if not self.result.status_bytes:
            self.result.status_bytes = sum(len(encode(status)) for status in statuses)
        for router in self.routers:
            router.heard(statuses)

    def _arrive(self, now: float, prompt: list[int], output: int) -> None:
        sampling = Sampling(output, temperature=0.0, ignore_eos=True)
        stream = SimulatedStream(Submit(next(self._ids), pack_u32(prompt), sampling), now)
        stream.frontend = self._draw.randrange(len(self.routers))
        router = self.routers[stream.frontend]
        begun = time.thread_time()
        stream.worker = router.choose(stream)
        self.result.choices += time.thread_time() - begun
        self.result.requests += 1
        worker = self.workers[stream.worker]
        if not worker.submit(stream.submit.id, stream, prompt, now):
            self.result.refused += 1
            router.ended(stream)
        elif worker.computing is None:
            self._begin(worker, now)

    def _step(self, now: float, index: int) -> None:
        worker = self.workers[index]
        for stream, tokens, ended in worker.end(now):
            if tokens and not stream.output:
                self.result.ttft.append(now - stream.arrived)
            stream.output += [GENERATED_ID] * tokens
            if ended:
                self.routers[stream.frontend].ended(stream)
        self._begin(worker, now)

    def _begin(self, worker: SimulatedWorker, now: float) -> None:
        if (end := worker.begin(now)) is not None:
            heapq.heappush(self._ends, (end, worker.index))


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, ceil(share * len(ordered)) - 1)] if ordered else 0.0


def row(workers: int, workload: Workload, seconds: float, cost: CostModel) -> list[str]:
    frontends = min(50, max(1, workers // FRONTENDS_FOR))
    fleet = Fleet(workers, frontends, cost)
    result = fleet.run(workload.arrivals(workers, seconds, random.Random(workers)))
    return [
        str(workers), str(frontends), str(result.requests), str(result.refused),
        f"{result.choices / max(1, result.requests) * 1e6:.0f}",
        f"{result.status_bytes / STATUS_S / 1e3:.0f}",
        f"{result.hits / max(1, result.queries):.2f}",
        f"{quantile(result.ttft, 0.5):.2f}", f"{quantile(result.ttft, 0.99):.2f}",
    ]  # fmt: skip


HEAD = ["workers", "frontends", "requests", "refused", "µs a request", "status kB/s", "cached", "p50 TTFT", "p99 TTFT"]


def main(argv: list[str] | None = None, show: Callable[[Any], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=positive_int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--workload", choices=WORKLOADS, default="agents")
    parser.add_argument("--seconds", type=float, default=12.0, help="of arrivals")
    parser.add_argument("--cost", default="cpu-qwen3-0.6b", help="see sluice simulate")
    args = parser.parse_args(argv)
    rows = [row(workers, WORKLOADS[args.workload], args.seconds, load(args.cost)) for workers in args.workers]
    show(aligned([HEAD, *rows]))


if __name__ == "__main__":
    main()
