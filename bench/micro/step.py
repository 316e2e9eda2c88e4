"""Measures the worker's time per step outside of the model: receive, plan, pack, commit and publish. No model runs.

python -m bench.micro.step [--sequences 32,256] [--context 512]
"""

import argparse
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass, field

import torch

from shared.messages import Request, Sampling, Step, Submit
from shared.wire import encode, pack_u32
from worker.engine.loop import Loop
from worker.engine.metrics import Metrics, Stats
from worker.engine.requests import RequestTable
from worker.engine.transport import FrontendGone
from worker.kv_cache.pages import PagePool
from worker.model_runner.inputs import build_inputs
from worker.model_runner.sampler import sample_rows
from worker.model_runner.step import HostCopy, InFlightStep
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Plan

PAGE_SIZE, STEPS = 16, 200
CPU = torch.device("cpu")


@dataclass
class EncodingServer:
    """A wire server that encodes messages and does not send them."""

    inbox: deque[tuple[bytes, Request | FrontendGone]] = field(default_factory=deque)
    encoding_s: float = 0.0

    def publish(self, topic: bytes, step: Step) -> None:
        started = time.perf_counter()
        encode(step)
        self.encoding_s += time.perf_counter() - started

    def progress(self) -> None: ...
    def flush(self) -> None: ...
    def refresh(self) -> None: ...


@dataclass
class GreedyRunner:
    """A runner that packs inputs and samples greedily from a vocabulary of eight."""

    logits: torch.Tensor = field(default_factory=lambda: torch.zeros(4096, 8))
    packing_s: float = 0.0
    sampling_s: float = 0.0

    def launch(self, plan: Plan, before: InFlightStep | None) -> InFlightStep:
        started = time.perf_counter()
        build_inputs(plan.chunks, PAGE_SIZE, CPU)
        packed = time.perf_counter()
        rows = plan.rows
        ids = sample_rows(self.logits[: len(rows)], rows, (2,)).fill_(7)
        self.packing_s += packed - started
        self.sampling_s += time.perf_counter() - packed
        return InFlightStep(plan, 0, ids, HostCopy(ids))


def measure(sequences: int, context: int) -> dict[str, float]:
    """Returns microseconds per decode step, as medians or means over STEPS steps. No sequence starts or ends."""
    pages = sequences * -(-(context + STEPS + 64) // PAGE_SIZE) + 1
    config = SchedulerConfig(max_seq_len=1 << 16, max_batch_size=sequences, max_step_tokens=1 << 20)
    scheduler, stats, metrics = Scheduler(config, [PagePool(pages, PAGE_SIZE)]), Stats(), Metrics()
    request_table = RequestTable(scheduler, stats, metrics, vocab_size=1000, seeds=random.Random(0))
    server, runner = EncodingServer(), GreedyRunner()
    loop = Loop(scheduler, runner, request_table, server, stats, metrics)  # type: ignore[arg-type]
    sampling = Sampling(STEPS + 32, temperature=0.0, ignore_eos=True)
    for id in range(sequences):
        prompt = [random.randrange(1000) for _ in range(context)]
        server.inbox.append((b"frontend", Submit(id, pack_u32(prompt), sampling)))
    while scheduler.status.generation_tokens < 8 * sequences:
        loop.iterate()
    server.encoding_s = runner.packing_s = runner.sampling_s = 0.0
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        loop.iterate()
        times.append(time.perf_counter() - started)
    parts = {"pack": runner.packing_s, "sample": runner.sampling_s, "encode": server.encoding_s}
    return {"whole": 1e6 * statistics.median(times), **{name: 1e6 * s / STEPS for name, s in parts.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", default="32,256")
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    for count in map(int, args.sequences.split(",")):
        row = measure(count, args.context)
        print(f"{count} sequences: " + ", ".join(f"{name} {value:.0f} µs" for name, value in row.items()))


if __name__ == "__main__":
    main()
