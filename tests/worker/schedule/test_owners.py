"""Fairness between owners, priority within one, and the places that are kept for others."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.schedule.harness import Rig
from worker.schedule.admission import QueueFull
from worker.schedule.sequence import Sequence


def order(rig: Rig, steps: int = 500) -> list[Sequence]:
    """Everybody, in the order in which they first ran, until all have ended."""
    joined: dict[Sequence, None] = {}
    for _ in range(steps):
        if not rig.scheduler.has_work:
            return list(joined)
        rig.now += 1.0
        plan = rig.plan()
        joined |= dict.fromkeys(chunk.sequence for chunk in plan.chunks)
        rig.commit(plan, rig.run(plan))
    raise AssertionError("it does not end")


def test_owners_take_turns_and_each_ones_requests_keep_their_order() -> None:
    rig = Rig(max_batch_size=1)
    a = [rig.submit(4, max_tokens=4, tenant="a") for _ in range(4)]
    b = [rig.submit(4, max_tokens=4, tenant="b") for _ in range(2)]
    assert order(rig) == [a[0], b[0], a[1], b[1], a[2], a[3]]


def test_turns_are_weighed_in_tokens_of_prompt_and_output() -> None:
    rig = Rig(max_batch_size=1, pages=200)
    a = [rig.submit(4, max_tokens=20, tenant="a") for _ in range(3)]
    b = [rig.submit(4, max_tokens=4, tenant="b") for _ in range(6)]
    assert order(rig) == [a[0], *b[:3], a[1], *b[3:], a[2]]


def test_what_the_prefix_cache_gives_costs_an_owner_nothing() -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
    rig = Rig(max_batch_size=1)
    rig.submit(prompt, max_tokens=1)
    rig.submit(13, max_tokens=1, tenant="b")
    a = [rig.submit(prompt, max_tokens=1, tenant="a") for _ in range(4)]
    b = rig.submit(13, max_tokens=1, tenant="b")
    assert order(rig)[-5:] == [*a, b]


def test_a_pause_earns_nothing() -> None:
    rig = Rig(max_batch_size=1)
    a = [rig.submit(8, max_tokens=8, tenant="a") for _ in range(6)]
    while a[3] not in rig.ends:
        rig.step()
    b = [rig.submit(8, max_tokens=8, tenant="b") for _ in range(3)]
    order(rig)
    assert list(rig.ends).index(a[5]) < list(rig.ends).index(b[2]), "a had four, which is no debt to b"


def test_lower_priority_goes_first_within_an_owner_only() -> None:
    rig = Rig(max_batch_size=1)
    late, first, last = (rig.submit(2, max_tokens=2, tenant="a", priority=priority) for priority in (5, -1, 7))
    other = rig.submit(2, max_tokens=2, tenant="b", priority=1000)
    also = rig.submit(2, max_tokens=2, tenant="a", priority=5)
    assert order(rig) == [first, other, late, also, last]


def test_priority_orders_a_queue_without_keys_and_a_static_batch() -> None:
    for mode in ({}, {"batching_mode": "static", "use_chunked_prefill": False, "batch_wait_timeout_s": 0.0}):
        rig = Rig(max_batch_size=1, **mode)
        low, high = rig.submit(3, max_tokens=1, priority=1), rig.submit(3, max_tokens=1, priority=0)
        assert order(rig) == [high, low]


def test_static_batches_are_shared() -> None:
    rig = Rig(batching_mode="static", use_chunked_prefill=False, batch_wait_timeout_s=0.0, max_batch_size=4)
    for _ in range(8):
        rig.submit(3, max_tokens=1, tenant="a")
    for _ in range(2):
        rig.submit(3, max_tokens=1, tenant="b")
    assert Counter(chunk.sequence.tenant for chunk in rig.plan().chunks) == {"a": 2, "b": 2}


def test_siblings_follow_their_leader_in_its_owners_turn() -> None:
    rig = Rig(max_batch_size=2)
    group = [rig.submit([3, 1, 4, 1, 5, 9, 2, 6, 5], max_tokens=3, group=1, tenant="a") for _ in range(3)]
    others = [rig.submit(9, max_tokens=3, tenant="b") for _ in range(2)]
    after = rig.submit(9, max_tokens=3, tenant="a")
    assert order(rig)[:2] == [group[0], others[0]]
    assert set(rig.ends) == {*group, *others, after}


def test_siblings_go_before_what_came_after_their_leader() -> None:
    rig = Rig(max_batch_size=1)
    group = [rig.submit([3, 1, 4, 1, 5, 9, 2, 6, 5], max_tokens=3, group=1) for _ in range(3)]
    other = rig.submit(9, max_tokens=3)
    assert order(rig) == [*group, other]


def test_an_owner_without_anything_running_takes_a_place_of_who_runs_more_than_its_share() -> None:
    rig = Rig(pages=129, max_batch_size=4)
    flood = [rig.submit(3, max_tokens=30, tenant="a") for _ in range(8)]
    for _ in range(3):
        rig.step()
    one = rig.submit(3, max_tokens=4, tenant="b")
    plan = rig.plan()
    assert plan.preempted == [flood[3]] and plan.chunks[-1].sequence is one
    rig.commit(plan, rig.run(plan))
    other = rig.submit(3, max_tokens=4, tenant="b")
    assert not rig.plan().preempted, "one place is enough"
    rig.finish(400)
    ended = list(rig.ends)
    assert ended.index(one) == 0 and ended.index(flood[3]) < ended.index(flood[4]) and other in ended


@pytest.mark.parametrize("mode", [{"prefix_cache": False}, {"batching_mode": "static", "use_chunked_prefill": False}])
def test_nobody_is_sent_away_who_would_have_to_begin_again(mode: dict[str, object]) -> None:
    rig = Rig(max_batch_size=2, batch_wait_timeout_s=0.0, **mode)
    for _ in range(3):
        rig.submit(3, max_tokens=20, tenant="a")
    rig.step()
    rig.submit(3, tenant="b")
    assert not rig.plan().preempted


# places


def fill(rig: Rig, tenant: str, prompt: int = 2) -> int:
    """How many more of an owner are taken."""
    for count in range(1000):
        try:
            rig.submit(prompt, tenant=tenant)
        except QueueFull as refused:
            assert (
                tenant in str(refused) or not tenant or rig.scheduler.status.waiting >= rig.config.max_waiting_requests
            )
            return count
    raise AssertionError


def test_one_owner_cannot_fill_the_queue_and_the_next_one_always_finds_a_place() -> None:
    rig = Rig(max_batch_size=1, max_waiting_requests=64)
    rig.submit(2, max_tokens=9, tenant="a")
    rig.step()
    assert fill(rig, "a") == 56
    taken = [fill(rig, name) for name in "bcdefgh"]
    assert taken[:3] == [7, 1, 0] or all(taken[:2]), taken
    assert rig.scheduler.status.waiting <= 64


def test_without_keys_the_whole_queue_may_be_filled() -> None:
    rig = Rig(max_batch_size=1, max_waiting_requests=16)
    rig.submit(2, max_tokens=9)
    rig.step()
    assert fill(rig, "") == 16


def test_waiting_tokens_are_kept_for_others_too() -> None:
    rig = Rig(max_batch_size=1, max_waiting_requests=1000, max_waiting_tokens=160)
    rig.submit(2, max_tokens=9, tenant="a")
    rig.step()
    assert fill(rig, "a", prompt=4) == 35
    assert fill(rig, "b", prompt=4) >= 1


# whatever they send

requests = st.tuples(st.integers(1, 30), st.integers(1, 20))


@settings(max_examples=25, deadline=None, database=None)
@given(
    flood=st.lists(requests, min_size=10, max_size=40),
    others=st.lists(st.lists(requests, min_size=1, max_size=3), min_size=1, max_size=3),
    places=st.integers(1, 6),
    ahead=st.integers(0, 40),
)
def test_a_flood_delays_others_by_a_few_times_their_own_share(
    flood: list[tuple[int, int]], others: list[list[tuple[int, int]]], places: int, ahead: int
) -> None:
    """In tokens computed between a request's arrival and its end: its own and those of as many owners."""
    rig = Rig(pages=400, max_batch_size=places, max_step_tokens=12, prefill_chunk_size=8)
    for prompt, output in flood:
        rig.submit(prompt, max_tokens=output, tenant="flood")
    computed = 0
    todo = {f"other{number}": list(wanted) for number, wanted in enumerate(others)}
    waiting: dict[str, tuple[Sequence, int]] = {}
    longest = 50  # of any request, prompt and output
    for step in range(6000):
        for name, wanted in todo.items():
            if step >= ahead and wanted and name not in waiting:
                prompt, output = wanted.pop(0)
                waiting[name] = rig.submit(prompt, max_tokens=output, tenant=name), computed
        if not rig.scheduler.has_work:
            break
        plan = rig.plan()
        computed += plan.tokens
        rig.commit(plan, rig.run(plan))
        for name, (sequence, began) in list(waiting.items()):
            if sequence in rig.ends:
                share = (len(todo) + 1) * len(sequence.tokens)
                assert computed - began <= 3 * share + 2 * (places + 2) * longest, f"{name} waited too long"
                del waiting[name]
    assert not waiting and not rig.scheduler.has_work


@settings(max_examples=25, deadline=None, database=None)
@given(data=st.data(), places=st.integers(1, 5), pages=st.sampled_from([20, 60]))
def test_owners_come_and_go_at_random_and_all_accounts_agree(data: st.DataObject, places: int, pages: int) -> None:
    """Rig checks accounts, queue and pages after each act, and each output against the plainest loop."""
    rig = Rig(pages=pages, max_batch_size=places, max_step_tokens=9, prefill_chunk_size=4)
    for _ in range(60):
        act = data.draw(st.sampled_from("ssspppat"))
        live = rig.scheduler.sequences()
        if act == "s":
            prompt = [[1, 2, 3, 4] * 5, [5] * 20][data.draw(st.integers(0, 1))][: data.draw(st.integers(1, 20))]
            rig.submit(
                prompt, data.draw(st.integers(0, 12)), tenant=data.draw(st.sampled_from(["", "a", "b", "c"])),
                priority=data.draw(st.integers(-1, 1)), group=data.draw(st.sampled_from([0, 0, 1])),
            )  # fmt: skip
        elif act == "a" and live:
            rig.scheduler.abort(live[data.draw(st.integers(0, len(live) - 1))].key)
            rig.scheduler.check()
        elif act == "t":
            rig.now += 1.0
        else:
            rig.step()
    rig.finish(5000)
    assert rig.pool.counts().owned == 0
