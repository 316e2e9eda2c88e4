"""Each scheduling mode is better on the workload that it is made for, and no mode starves a request."""

from itertools import product
from typing import Any

import pytest

from bench.simulate.cost import CostModel
from bench.simulate.replay import Replay
from bench.simulate.traffic import Synthetic
from tests.bench.simulate.harness import CPU, gaps, p99, simulated, traffic, workload

STATIC = {"batching_mode": "static", "use_chunked_prefill": False}
POLICIES = ("fcfs", "prefill_first", "decode_round_robin")
BATCHINGS: tuple[dict[str, Any], ...] = (STATIC, {"use_chunked_prefill": False}, {"prefill_chunk_size": 16})
MODES = [
    {**batching, "scheduler_policy": policy, "kv_cache_backend": backend, "prefix_cache": backend == "paged"}
    for batching, policy, backend in product(BATCHINGS, POLICIES, ("paged", "contiguous"))
]


def ttfts(result: Replay) -> list[float]:
    assert not result.refused
    return [request.ttft for request in result.requests]


def test_continuous_batching_answers_sooner_than_static() -> None:
    requests = workload("continuous_batching", rate=0.1)
    continuous, static = (simulated(requests, CPU, 4096, **flags) for flags in ({}, STATIC))
    assert p99(ttfts(continuous)) * 4 < p99(ttfts(static))


def test_chunked_prefill_keeps_streams_flowing() -> None:
    requests = workload("chunked_prefill", rate=0.05)
    chunked = simulated(requests, CPU, 8192, prefill_chunk_size=128, max_step_tokens=256)
    whole = simulated(requests, CPU, 8192, use_chunked_prefill=False)
    assert 2 * p99(gaps(chunked.requests)) <= p99(gaps(whole.requests))


@pytest.mark.parametrize("rate", [0.02, 1.0])
def test_prefix_cache_computes_a_shared_prefix_once(rate: float) -> None:
    requests = workload("prefix_caching", rate)
    cached, plain = (simulated(requests, CPU, 8192, prefix_cache=on) for on in (True, False))
    assert 2 * sum(ttfts(cached)) < sum(ttfts(plain))
    assert sum(request.cached_tokens >= 1008 for request in cached.requests) >= 40
    assert not any(request.cached_tokens for request in plain.requests)


def test_paged_backend_holds_more_sequences_than_contiguous() -> None:
    requests = workload("paged_attention")
    paged = simulated(requests, CPU, 512, 1024)
    contiguous = simulated(requests, CPU, 512, 1024, kv_cache_backend="contiguous", prefix_cache=False)
    most = [max(sample.running for sample in result.timeline) for result in (paged, contiguous)]
    assert most[1] == 16 and most[0] >= 1.9 * most[1]
    assert paged.end < contiguous.end


def test_decode_round_robin_shares_steps_that_cannot_hold_all() -> None:
    requests, flags = traffic(*[(0.0, 1, 20)] * 8), {"max_step_tokens": 4, "max_batch_size": 8}
    round_robin, fcfs = (
        simulated(requests, scheduler_policy=policy, **flags) for policy in ("decode_round_robin", "fcfs")
    )
    assert max(gaps(round_robin.requests)) <= 4
    assert max(ttfts(round_robin)) < max(ttfts(fcfs))


@pytest.mark.parametrize("flags", MODES, ids=lambda flags: "-".join(map(str, flags.values())))
def test_every_mode_under_sustained_overload_starves_no_request(flags: dict[str, Any]) -> None:
    """No request waits longer than all requests ahead would take one after another.

    The overload lasts much longer than this wait.
    """
    cost, places = CostModel(overhead=0.01, token=1e-4, kv_token=0.0), 6
    requests = Synthetic(rate=60, duration=30, prompt=(1, 60), output=(1, 40)).make()
    result = simulated(
        requests, cost, 24, 100, every_step=True, page_size=16, max_batch_size=places, max_waiting_requests=places,
        max_step_tokens=20, **flags,
    )  # fmt: skip
    # seconds of the longest request if it has the worker to itself
    alone = 40 * cost.seconds(1, 0, 1) + 4 * cost.seconds(20, 0, 1)
    bound = (2 * places + 1) * alone
    assert result.refused > 100 and len(result.finished) > 200
    assert result.end > 5 * bound
    assert max(request.done - request.sent for request in result.finished) < bound
