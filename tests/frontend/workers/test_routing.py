"""Tests of frontend/workers/routing.py."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from frontend.workers import routing
from frontend.workers.routing import (
    AFFINITY_MARGIN,
    PrefixAffinity,
    Router,
    choose,
    load,
)
from frontend.workers.stream import Stream
from shared.messages import EXPECTED_TOKENS, CachedPrefixes, Sampling, Status, Submit, WorkerState
from shared.prefix_identity import prefix_keys
from shared.wire import pack_u32

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


def test_prefix_affinity_remembers_the_latest_prefixes() -> None:
    short, long = prefix_keys(pack_u32(range(100)), ""), prefix_keys(pack_u32(range(300)), "")
    known = PrefixAffinity(size=3)
    known.remember(short, "a")
    known.remember(long, "b")
    assert [known.workers_with(key) for key in long] == [{"a", "b"}, {"b"}]
    known.evicted([long[0], 5], "a")
    assert known.workers_with(long[0]) == {"b"}
    known.forget("b")
    assert not known.workers_with(long[1])
    known.remember(range(10), "c")
    assert len(known) == 3


def test_load_counts_the_tokens_still_to_compute() -> None:
    loop = asyncio.new_event_loop()
    fresh = Stream(Submit(1, pack_u32(range(50)), Sampling(20)), loop.create_future())
    begun = Stream(Submit(2, pack_u32(range(50)), Sampling(20)), loop.create_future(), output=[1, 2, 3])
    endless = Stream(Submit(3, pack_u32(range(50)), Sampling(10**6)), loop.create_future(), output=[1])
    loop.close()
    assert [load([s], None) for s in (fresh, begun, endless)] == [70, 17, EXPECTED_TOKENS]
    status = Status(1, 1, "m", "cpu", "float32", WorkerState.READY, running=3, expected_tokens=500)
    assert load([fresh, begun], status) == load([], status) == 500, "other frontends have streams there, too"
    assert load([fresh, begun], status, {fresh: 40}) == 460
    saving = structs.replace(status, prefixes=CachedPrefixes(saved_tokens=100))
    assert load([fresh, begun], saving) == 87 + (500 - 87) * 400 // 500, "a fifth will be found"
    assert load([fresh, begun, endless], saving) == 70 + 17 + EXPECTED_TOKENS, "all that it has is ours"


def test_load_counts_no_tokens_that_are_expected_in_the_cache() -> None:
    loop = asyncio.new_event_loop()
    fresh = Stream(Submit(1, pack_u32(range(50)), Sampling(20)), loop.create_future())
    begun = Stream(Submit(2, pack_u32(range(50)), Sampling(20)), loop.create_future(), output=[1, 2, 3])
    loop.close()
    assert load([fresh, begun], None, {fresh: 40, begun: 40}) == 30 + 17


def test_choose_follows_a_prefix_as_far_as_it_saves_tokens() -> None:
    far = AFFINITY_MARGIN + 500
    assert choose([0, far], [[1]], saved=[far]) == 1
    assert choose([0, far + 1], [[1]], saved=[far]) == 0


def test_router_sends_an_equal_prefix_to_the_same_worker_and_short_prompts_in_turns() -> None:
    router, prompt, names = Router(), pack_u32(range(300)), ["a", "b", "c"]
    first, saved = router.choose(prompt, "", names, [0, 0, 0])
    assert saved == 0 and router.choose(prompt, "", names, [0, 0, 0]) == (first, 256)
    busy = [AFFINITY_MARGIN * 2 * (at == first) for at in range(3)]
    second, _ = router.choose(prompt, "", names, busy)
    assert second != first
    assert router.choose(prompt, "", names, busy) == (second, 256)
    turns = [router.choose(pack_u32([1, 2]), "", names, [0, 0, 0])[0] for _ in range(6)]
    assert turns in ([0, 1, 2] * 2, [1, 2, 0] * 2, [2, 0, 1] * 2)
    router.forget(names[second])
    assert router.choose(prompt, "", names, [0, 0, 0]) == (first, 256)


def test_router_follows_what_workers_report_and_forgets_what_they_evicted() -> None:
    router, prompt, names = Router(0), pack_u32(range(300)), ["a", "b", "c"]
    keys = prefix_keys(prompt, "")
    came = CachedPrefixes(pack_u32(keys), check=keys[0] ^ keys[1])
    router.learn("c", came)
    assert router.choose(prompt, "", names, [0, 0, 9]) == (2, 256), "another frontend sent it there"
    router.learn("c", CachedPrefixes(b"", pack_u32(keys)))
    assert router.choose(prompt, "", names, [0, 0, 9]) == (0, 0)


def test_frontends_agree_on_the_home_of_a_prefix_and_few_change_it_when_a_worker_leaves() -> None:
    names = [f"tcp://worker-{at}:5555" for at in range(40)]
    prompts = [pack_u32([at, *range(300)]) for at in range(300)]

    def chosen(names: list[str]) -> list[str]:
        router = Router()  # a new router for each prompt, so that no earlier choice matters
        return [names[router.choose(prompt, "", names, [0] * len(names))[0]] for prompt in prompts]

    before, other = chosen(names), chosen(names)
    assert before == other, "another frontend that knows nothing finds the same"
    assert len(set(before)) > 30, "homes are spread"
    left = chosen([name for name in names if name != names[7]])
    changed = [old for old, new in zip(before, left, strict=True) if old != new]
    assert changed and set(changed) == {names[7]}
    assert chosen(names[::-1]) == before, "the order of the workers does not matter"
    router = Router()
    home = router.choose(prompts[0], "", names, [0] * 40)[0]
    salted = {Router().choose(prompts[0], f"s{at}", names, [0] * 40)[0] for at in range(9)}
    assert salted != {home}, "another identity has other homes"


def test_homes_that_are_remembered_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_HOMES", 3)
    router = Router()
    for at in range(10):
        router.choose(pack_u32([at] * 80), "", ["a", "b"], [0, 0])
    assert len(router._homes) == 3


def test_a_home_is_taken_only_as_far_as_it_saves_tokens() -> None:
    for hope in (0, 100, 700):
        assert choose([0, 50, hope], homes=[2], hope=hope) == 2
        assert choose([0, 50, hope + 1], homes=[2], hope=hope) == 0
    assert choose([0, 10, 5], [[1]], homes=[2], hope=700) == 1, "a known prefix goes before a home"
