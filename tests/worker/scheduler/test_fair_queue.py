"""Fairness between tenants, and priority within a tenant."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.scheduler.harness import Rig, join_order
from worker.scheduler.sequence import Sequence


def test_tenants_alternate_and_each_keeps_its_own_order() -> None:
    rig = Rig(max_batch_size=1)
    a = [rig.submit(4, max_tokens=4, tenant="a") for _ in range(4)]
    b = [rig.submit(4, max_tokens=4, tenant="b") for _ in range(2)]
    assert join_order(rig) == [a[0], b[0], a[1], b[1], a[2], a[3]]


def test_tenants_share_by_tokens_of_prompt_and_output() -> None:
    rig = Rig(max_batch_size=1, pages=200)
    a = [rig.submit(4, max_tokens=20, tenant="a") for _ in range(3)]
    b = [rig.submit(4, max_tokens=4, tenant="b") for _ in range(6)]
    assert join_order(rig) == [a[0], *b[:3], a[1], *b[3:], a[2]]


def test_tenant_is_not_charged_for_cached_tokens() -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
    rig = Rig(max_batch_size=1)
    rig.submit(prompt, max_tokens=1)
    rig.submit(13, max_tokens=1, tenant="b")
    a = [rig.submit(prompt, max_tokens=1, tenant="a") for _ in range(4)]
    b = rig.submit(13, max_tokens=1, tenant="b")
    assert join_order(rig)[-5:] == [*a, b]


def test_tenant_that_pauses_earns_nothing() -> None:
    rig = Rig(max_batch_size=1)
    a = [rig.submit(8, max_tokens=8, tenant="a") for _ in range(6)]
    while a[3] not in rig.ends:
        rig.step()
    b = [rig.submit(8, max_tokens=8, tenant="b") for _ in range(3)]
    join_order(rig)
    assert list(rig.ends).index(a[5]) < list(rig.ends).index(b[2]), "a ran four alone, which b may not make up for"


def test_priority_orders_requests_of_one_tenant_only() -> None:
    rig = Rig(max_batch_size=1)
    late, first, last = (rig.submit(2, max_tokens=2, tenant="a", priority=priority) for priority in (5, -1, 7))
    other = rig.submit(2, max_tokens=2, tenant="b", priority=1000)
    also = rig.submit(2, max_tokens=2, tenant="a", priority=5)
    assert join_order(rig) == [first, other, late, also, last]


def test_priority_orders_requests_without_tenant_and_static_batches() -> None:
    for mode in ({}, {"batching_mode": "static", "use_chunked_prefill": False, "batch_wait_timeout_s": 0.0}):
        rig = Rig(max_batch_size=1, **mode)
        low, high = rig.submit(3, max_tokens=1, priority=1), rig.submit(3, max_tokens=1, priority=0)
        assert join_order(rig) == [high, low]


def test_static_batch_is_shared_between_tenants() -> None:
    rig = Rig(batching_mode="static", use_chunked_prefill=False, batch_wait_timeout_s=0.0, max_batch_size=4)
    for _ in range(8):
        rig.submit(3, max_tokens=1, tenant="a")
    for _ in range(2):
        rig.submit(3, max_tokens=1, tenant="b")
    assert Counter(chunk.sequence.turn.tenant for chunk in rig.plan().chunks) == {"a": 2, "b": 2}


def test_starved_tenant_preempts_the_one_over_its_share() -> None:
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
def test_starved_tenant_preempts_none_that_would_have_to_start_again(mode: dict[str, object]) -> None:
    rig = Rig(max_batch_size=2, batch_wait_timeout_s=0.0, **mode)
    for _ in range(3):
        rig.submit(3, max_tokens=20, tenant="a")
    rig.step()
    rig.submit(3, tenant="b")
    assert not rig.plan().preempted


requests = st.tuples(st.integers(1, 30), st.integers(1, 20))  # lengths of prompt and output


@settings(max_examples=25, deadline=None, database=None)
@given(
    flood=st.lists(requests, min_size=10, max_size=40),
    others=st.lists(st.lists(requests, min_size=1, max_size=3), min_size=1, max_size=3),
    places=st.integers(1, 6),
    ahead=st.integers(0, 40),
)
def test_flood_delays_other_tenants_by_a_few_times_their_share(
    flood: list[tuple[int, int]], others: list[list[tuple[int, int]]], places: int, ahead: int
) -> None:
    """The delay of a request is the number of tokens that are computed between its arrival and its end."""
    rig = Rig(pages=400, max_batch_size=places, max_step_tokens=12, prefill_chunk_size=8)
    for prompt, output in flood:
        rig.submit(prompt, max_tokens=output, tenant="flood")
    computed = 0
    todo = {f"other{number}": list(wanted) for number, wanted in enumerate(others)}
    waiting: dict[str, tuple[Sequence, int]] = {}
    longest = 50  # tokens of the longest request, prompt and output together
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
def test_random_tenants_keep_accounts_consistent(data: st.DataObject, places: int, pages: int) -> None:
    """The rig checks accounts, queue and pages after each event, and compares outputs with the simplest loop's."""
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
