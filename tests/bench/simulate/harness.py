"""Helpers for the simulator's tests: small traffic, and simulations of the benchmarks' workloads."""

from typing import Any

from bench.client.workloads import WORKLOADS, Scale
from bench.simulate.cost import PRESETS, CostModel
from bench.simulate.replay import Replay, Request, build, replay
from bench.simulate.traffic import VOCAB, Arrival, Traffic
from shared.config.worker import WorkerConfig, with_default_sizes

CPU = PRESETS["cpu-qwen3-0.6b"]
SECOND = CostModel(overhead=1.0, token=0.0, kv_token=0.0)  # every step takes one second


def simulated(
    traffic: Traffic,
    cost: CostModel = SECOND,
    pages: int = 64,
    max_seq_len: int = 0,
    every_step: bool = False,
    **flags: Any,
) -> Replay:
    """Simulates the traffic. Checks the scheduler's invariants at the end and, with `every_step`, after each step.

    Asserts that no page stays owned.
    """
    scheduler, pool = build(with_default_sizes(WorkerConfig(**flags), on_gpu=False), pages, max_seq_len)
    result = replay(traffic, scheduler, pool, cost, on_step=lambda sample: scheduler.check() if every_step else None)
    scheduler.check()
    assert not scheduler.has_work and pool.counts().owned == 0
    return result


def workload(name: str, rate: float = 1.0, length: float = 1.0) -> Traffic:
    made = WORKLOADS[name]
    return Traffic.of(made.make(VOCAB, Scale(rate, length)), made.sequential)


def traffic(*requests: tuple[float, int, int], sequential: bool = False) -> Traffic:
    """Makes requests from tuples (arrival, prompt tokens, max_tokens); no two prompts share a prefix."""
    arrivals = (Arrival(at, [1000 + i] * prompt, output) for i, (at, prompt, output) in enumerate(requests))
    return Traffic(tuple(arrivals), sequential)


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def gaps(requests: list[Request]) -> list[float]:
    return [gap for request in requests for gap in request.gaps]
