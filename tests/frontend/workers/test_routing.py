"""frontend/workers/routing.py."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from frontend.workers.routing import (
    AFFINITY_MARGIN,
    EXPECTED_TOKENS,
    OTHER_REQUEST_TOKENS,
    PrefixAffinity,
    Router,
    choose,
    load,
    prefix_hashes,
)
from frontend.workers.stream import Stream
from shared.messages import Sampling, Status, Submit, WorkerState
from shared.wire.codec import pack_u32

LOADS = st.lists(st.integers(0, 10**6), min_size=1, max_size=6)


@given(LOADS, st.integers(0, 10))
def test_choose_takes_the_least_loaded(loads: list[int], turn: int) -> None:
    assert loads[choose(loads, (), turn)] == min(loads)


@given(st.integers(1, 6))
def test_choose_rotates_among_equals(count: int) -> None:
    turn, taken = 0, []
    for _ in range(2 * count):
        taken.append(choose([7] * count, (), turn))
        turn = taken[-1] + 1
    assert taken == [*range(count)] * 2


@given(LOADS, st.lists(st.sets(st.integers(0, 5)), max_size=4))
def test_choose_prefers_a_cached_prefix_within_the_margin(loads: list[int], knowing: list[set[int]]) -> None:
    knowing = [{i for i in workers if i < len(loads)} for workers in knowing]
    chosen, least = choose(loads, knowing), min(loads)
    bearable = least + max(AFFINITY_MARGIN, least // 4)
    wanted = next((near for workers in knowing if (near := {i for i in workers if loads[i] <= bearable})), set())
    assert chosen in wanted if wanted else loads[chosen] == least


def test_choose_prefers_the_longest_cached_prefix() -> None:
    assert choose([0, 10, 20], [[2], [1, 2]]) == 2
    assert choose([0, 10, AFFINITY_MARGIN + 1], [[2], [1, 2]]) == 1


def test_prefix_affinity_depends_on_tokens_and_salt() -> None:
    short, long = pack_u32(range(100)), pack_u32(range(300))
    known = PrefixAffinity(size=3)
    known.remember(prefix_hashes(short, ""), "a")
    assert known.workers_with(prefix_hashes(long, "")) == [{"a"}]
    assert (
        known.workers_with(prefix_hashes(long, "tenant"))
        == known.workers_with(prefix_hashes(pack_u32(range(1, 101)), ""))
        == []
    )
    assert prefix_hashes(pack_u32(range(20)), "") == []  # too short to be worth it
    known.remember(prefix_hashes(long, ""), "b")
    assert known.workers_with(prefix_hashes(long, "")) == [{"b"}, {"a", "b"}]
    known.forget("b")
    assert known.workers_with(prefix_hashes(short, "")) == [{"a"}]
    known.remember(range(10), "c")
    assert len(known) == 3


def test_load_counts_the_tokens_still_to_compute() -> None:
    loop = asyncio.new_event_loop()
    fresh = Stream(Submit(1, pack_u32(range(50)), Sampling(20)), loop.create_future())
    begun = Stream(Submit(2, pack_u32(range(50)), Sampling(20)), loop.create_future(), output=[1, 2, 3])
    endless = Stream(Submit(3, pack_u32(range(50)), Sampling(10**6)), loop.create_future(), output=[1])
    loop.close()
    assert [load([s], None) for s in (fresh, begun, endless)] == [70, 17, EXPECTED_TOKENS]
    status = Status(1, 1, "m", "cpu", "float32", WorkerState.READY, running=3, waiting=1, waiting_tokens=90)
    assert load([fresh, begun], status) == 70 + 17 + 2 * OTHER_REQUEST_TOKENS + (90 - 50)


def test_router_sends_an_equal_prefix_to_the_same_worker_until_it_is_forgotten() -> None:
    router, prompt, loads = Router(), pack_u32(range(100)), {"a": 0, "b": 0}
    first = router.choose(prompt, "", loads)
    assert router.choose(prompt, "", loads) == first
    assert router.choose(pack_u32(range(1, 101)), "", loads) != first, "others take turns"
    router.forget(list(loads)[first])
    assert router.choose(prompt, "", {**loads, list(loads)[first]: 1}) != first
