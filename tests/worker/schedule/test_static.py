"""Static batching: a batch forms, runs to its end, and only then comes the next."""

from typing import Any

from tests.worker.schedule.harness import Rig
from worker.schedule.sequence import Sequence


def static(**settings: Any) -> Rig:
    return Rig(batching_mode="static", use_chunked_prefill=False, **settings)


def members(rig: Rig) -> list[Sequence]:
    return [chunk.sequence for chunk in rig.plan().chunks]


def test_a_batch_runs_until_all_its_members_finished() -> None:
    rig = static(max_batch_size=4, batch_wait_timeout_s=0.0)
    a, b, c = rig.submit(3, max_tokens=1), rig.submit(3, max_tokens=1), rig.submit(3, max_tokens=3)
    assert members(rig) == [a, b, c]
    rig.step()
    late = rig.submit(3)
    for _ in range(2):
        assert members(rig) == [c], "there is room, but the batch is closed"
        rig.step()
    assert members(rig) == [late]


def test_a_batch_holds_max_batch_size_in_order_of_arrival() -> None:
    rig = static(max_batch_size=2, batch_wait_timeout_s=0.0)
    everyone = [rig.submit(3, max_tokens=1) for _ in range(5)]
    batches = []
    while rig.scheduler.has_work:
        batches.append(members(rig))
        rig.step()
    assert batches == [everyone[:2], everyone[2:4], everyone[4:]]


def test_a_full_batch_does_not_wait() -> None:
    rig = static(max_batch_size=4, batch_wait_timeout_s=1.0)
    everyone = [rig.submit(3) for _ in range(4)]
    assert rig.scheduler.next_wakeup(0.0) == 0.0
    assert members(rig) == everyone


def test_a_partial_batch_waits_for_the_timeout() -> None:
    rig = static(max_batch_size=4, batch_wait_timeout_s=0.010)
    a = rig.submit(3)
    assert members(rig) == []
    rig.now = 0.005
    b = rig.submit(3)
    assert members(rig) == []
    assert rig.scheduler.next_wakeup(0.005) == 0.010
    rig.now = 0.010
    assert members(rig) == [a, b]


def test_the_timer_is_fresh_for_each_batch() -> None:
    rig = static(max_batch_size=4, batch_wait_timeout_s=0.010)
    rig.submit(3, max_tokens=2)
    rig.finish(5)
    assert len(rig.ends) == 1
    rig.now = 5.0
    late = rig.submit(3)
    assert members(rig) == []
    rig.now = 5.009
    assert members(rig) == []
    rig.now = 5.010
    assert members(rig) == [late]


def test_who_waited_during_a_batch_waits_for_company_again() -> None:
    rig = static(max_batch_size=2, batch_wait_timeout_s=0.010)
    first = [rig.submit(3, max_tokens=3) for _ in range(2)]
    assert members(rig) == first
    late = rig.submit(3)
    for rig.now in (1.0, 2.0, 3.0):
        rig.step()
    assert rig.scheduler.status.running == 0 and members(rig) == []
    assert rig.scheduler.next_wakeup(3.0) == 3.010
    rig.now = 3.010
    assert members(rig) == [late]


def test_the_timer_of_a_request_that_left_is_not_inherited() -> None:
    rig = static(max_batch_size=2, batch_wait_timeout_s=0.010)
    gone = rig.submit(3)
    assert members(rig) == []
    rig.scheduler.abort(gone.key)
    rig.now = 0.009
    rig.submit(3)
    rig.now = 0.012
    assert members(rig) == []
    rig.now = 0.019
    assert len(members(rig)) == 1


def test_all_members_join_at_once_even_when_the_step_is_too_small() -> None:
    rig = static(max_batch_size=3, batch_wait_timeout_s=0.0, max_step_tokens=4)
    a, b, c = rig.submit(5, max_tokens=3), rig.submit(5), rig.submit(5)
    assert members(rig) == [a] and rig.scheduler.status.running == 3
    late = rig.submit(2)
    rig.step()
    assert members(rig) == [a, b]
    rig.finish(60)
    assert rig.ends.keys() == {a, b, c, late} and late.admitted >= max(a.admitted, b.admitted)


def test_a_preempted_member_comes_back_into_its_batch() -> None:
    rig = static(max_batch_size=2, batch_wait_timeout_s=0.0, pages=6, watermark=0.0, prefix_cache=False)
    a, b = rig.submit(4, max_tokens=10), rig.submit(4, max_tokens=10)
    rig.step()
    late = rig.submit(1, max_tokens=1)
    rig.finish(100)
    assert b.preemptions > 0 and a.preemptions == 0
    assert list(rig.ends) == [a, b, late]


def test_the_timer_is_fresh_after_a_batch_of_a_single_step() -> None:
    rig = static(max_batch_size=2, batch_wait_timeout_s=0.010)
    both = [rig.submit(3, max_tokens=1) for _ in range(2)]
    rig.now = 0.5
    plan = rig.plan()
    late = rig.submit(3)
    rig.commit(plan, rig.run(plan))
    assert list(rig.ends) == both
    rig.now = 1.0
    assert members(rig) == []
    rig.now = 1.010
    assert members(rig) == [late]
