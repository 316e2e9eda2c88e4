"""Simulated replays have exact times, are the same every time, and lose no request."""

import random

import pytest

from bench.simulate.replay import Stuck, build, replay
from bench.simulate.traffic import Arrival, Traffic
from shared.config.worker import WorkerConfig, with_default_sizes
from tests.bench.simulate.harness import CPU, SECOND, simulated, traffic, workload
from worker.scheduler.state import SchedulerState


def test_replay_times_are_those_of_its_steps() -> None:
    result = simulated(traffic((0, 4, 3), (0.5, 4, 1)))
    first, second = result.requests
    assert first.stamps == [1, 2, 3] and first.gaps == [1, 1] and first.done == 3
    assert (second.sent, second.stamps, second.ttft) == (0.5, [2], 1.5)
    assert [sample.batch for sample in result.timeline] == [1, 2, 1]
    assert result.end == 3


def test_replay_clock_jumps_over_idle_time() -> None:
    result = simulated(traffic((10, 4, 1), (20, 4, 1)))
    assert [(sample.at, sample.seconds, sample.batch) for sample in result.timeline] == [
        (0, 10, 0), (10, 1, 1), (11, 9, 0), (20, 1, 1),
    ]  # fmt: skip
    assert result.steps == 2


def test_replay_sequential_requests_wait_for_each_other() -> None:
    result = simulated(traffic((0, 4, 2), (0, 4, 2), (7, 4, 1), sequential=True))
    assert [(request.sent, request.done) for request in result.requests] == [(0, 2), (2, 4), (7, 8)]


def test_replay_records_a_refusal_and_goes_on() -> None:
    result = simulated(
        traffic((0, 4, 4), (0.5, 4, 1), (0.6, 4, 1), (0.7, 4, 5000)), max_batch_size=1, max_waiting_requests=1
    )
    assert [bool(request.refused) for request in result.requests] == [False, False, True, True]
    assert result.refused == 1, "only a full queue is a 503"
    assert "5004" in result.requests[3].refused
    assert len(result.finished) == 2


def test_replay_whose_requests_are_all_refused_ends() -> None:
    result = simulated(traffic((1, 4, 5000), (2, 4, 5000)))
    assert all(request.refused for request in result.requests) and result.steps == 0
    assert [request.done for request in result.requests] == [1, 2]


def test_replay_of_layers_with_a_window_needs_few_of_their_pages() -> None:
    sent = Traffic([Arrival(0.0, [7] * 3000, 20), Arrival(0.0, [8] * 3000, 20)])
    worker = with_default_sizes(WorkerConfig(page_size=16), on_gpu=False)
    finished = [
        replay(sent, *build(worker, 500, window=window, window_pages=pages), SECOND).finished
        for window, pages in ((0, 0), (256, 130))
    ]
    assert [request.stamps for request in finished[0]] == [request.stamps for request in finished[1]]
    scheduler, pool = build(worker, 500, window=256, window_pages=20)
    assert all(request.refused for request in replay(sent, scheduler, pool, SECOND).requests), "too few for a window"


def test_replay_of_recurrent_layers_continues_from_checkpoints() -> None:
    prompt = [number % 50 for number in range(3000)]
    sent = Traffic([Arrival(0.0, prompt, 4), Arrival(5000.0, prompt, 4), Arrival(10000.0, [*prompt[:1200], 7], 4)])
    flags = WorkerConfig(page_size=16, max_batch_size=2, state_checkpoint_tokens=512)
    worker = with_default_sizes(flags, on_gpu=False)

    def cached(**slots: int) -> list[int]:
        return [request.cached_tokens for request in replay(sent, *build(worker, 500, **slots), SECOND).finished]

    assert cached() == [0, 2992, 1200], "pages only"
    assert cached(state_slots=20) == [0, 2992, 1024], "the last full page of a prompt, and multiples of 512"
    assert cached(state_slots=5) == [0, 2992, 0], "few slots keep few checkpoints"
    with pytest.raises(ValueError, match="slots"):
        build(worker, 500, state_slots=1)


def test_replay_static_batch_waits_in_virtual_time() -> None:
    flags = {"batching_mode": "static", "use_chunked_prefill": False, "batch_wait_timeout_s": 5.0}
    result = simulated(traffic((1, 4, 2), (2, 4, 1)), **flags)
    assert [request.stamps[0] for request in result.requests] == [7, 7]


@pytest.mark.parametrize("name", ["continuous_batching", "chunked_prefill", "prefix_caching", "paged_attention"])
def test_replay_of_the_same_traffic_is_the_same(name: str) -> None:
    one, other = (simulated(workload(name, length=0.25), CPU, pages=300) for _ in range(2))
    assert one == other
    assert one.preemptions == other.preemptions


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("backend", ["paged", "contiguous"])
def test_replay_every_request_finishes_or_is_refused(seed: int, backend: str) -> None:
    rng = random.Random(seed)
    arrivals = [
        Arrival(rng.uniform(0, 30), [rng.randrange(3)] * rng.randint(1, 90), rng.randint(1, 60)) for _ in range(80)
    ]
    flags = {"kv_cache_backend": backend, "prefix_cache": backend == "paged", "max_waiting_requests": 12}
    result = simulated(Traffic(tuple(arrivals)), SECOND, 24, 128, every_step=True, page_size=8, **flags)
    by_time = sorted(arrivals, key=lambda arrival: arrival.at)
    assert len(result.requests) == 80
    for arrival, request in zip(by_time, result.requests, strict=True):
        assert len(request.stamps) == (0 if request.refused else arrival.max_tokens)
        assert request.refused or request.done == request.stamps[-1]
    assert result.refused, "the traffic was meant to be too much"
    assert sum(request.preemptions for request in result.finished) == result.preemptions
    assert (result.preemptions > 0) == (backend == "paged")
    for sample in result.timeline:
        assert sample.owned + sample.cached + sample.free == result.timeline[0].free


def test_replay_whose_scheduler_stops_raises_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerState, "join", lambda self, sequence, now: False)
    scheduler, pool = build(with_default_sizes(WorkerConfig(), on_gpu=False), 64)
    with pytest.raises(Stuck, match="1 wait"):
        replay(traffic((0, 4, 1)), scheduler, pool, SECOND)


def test_build_contiguous_gets_the_same_memory() -> None:
    _, paged = build(with_default_sizes(WorkerConfig(), on_gpu=False), 512, 1000)
    _, contiguous = build(
        with_default_sizes(WorkerConfig(kv_cache_backend="contiguous", prefix_cache=False), on_gpu=False), 512, 1000
    )
    assert paged.usable * paged.page_size >= contiguous.usable * contiguous.page_size
    assert (contiguous.usable, contiguous.page_size) == (16, 1000)
    with pytest.raises(ValueError, match="1000 tokens"):
        build(
            with_default_sizes(WorkerConfig(kv_cache_backend="contiguous", prefix_cache=False), on_gpu=False), 30, 1000
        )
