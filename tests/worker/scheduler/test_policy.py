"""Scheduling modes: static batches, unchunked prompts, and the order of decodes and prompts in a full step."""

from typing import Any

from tests.worker.scheduler.harness import Rig, members, shape
from worker.scheduler.sequence import Sequence


def static(**settings: Any) -> Rig:
    return Rig(batching_mode="static", use_chunked_prefill=False, **settings)


def planned(rig: Rig) -> list[Sequence]:
    return [chunk.sequence for chunk in rig.plan().chunks]


def test_static_batch_runs_until_all_its_members_finished() -> None:
    rig = static(max_batch_size=4, batch_wait_timeout_s=0.0)
    a, b, c = rig.submit(3, max_tokens=1), rig.submit(3, max_tokens=1), rig.submit(3, max_tokens=3)
    assert planned(rig) == [a, b, c]
    rig.step()
    late = rig.submit(3)
    for _ in range(2):
        assert planned(rig) == [c], "there is room, but the batch is closed"
        rig.step()
    assert planned(rig) == [late]


def test_static_batch_holds_max_batch_size_in_order_of_arrival() -> None:
    rig = static(max_batch_size=2, batch_wait_timeout_s=0.0)
    everyone = [rig.submit(3, max_tokens=1) for _ in range(5)]
    batches = []
    while rig.scheduler.has_work:
        batches.append(planned(rig))
        rig.step()
    assert batches == [everyone[:2], everyone[2:4], everyone[4:]]


def test_static_batch_that_is_full_does_not_wait() -> None:
    rig = static(max_batch_size=4, batch_wait_timeout_s=1.0)
    everyone = [rig.submit(3) for _ in range(4)]
    assert rig.scheduler.next_wakeup(0.0) == 0.0
    assert planned(rig) == everyone


def test_static_batch_that_is_not_full_waits_for_the_timeout() -> None:
    rig = static(max_batch_size=4, batch_wait_timeout_s=0.010)
    a = rig.submit(3)
    assert planned(rig) == []
    rig.now = 0.005
    b = rig.submit(3)
    assert planned(rig) == []
    assert rig.scheduler.next_wakeup(0.005) == 0.010
    rig.now = 0.010
    assert planned(rig) == [a, b]


def test_static_timer_starts_anew_for_each_batch() -> None:
    rig = static(max_batch_size=4, batch_wait_timeout_s=0.010)
    rig.submit(3, max_tokens=2)
    rig.finish(5)
    assert len(rig.ends) == 1
    rig.now = 5.0
    late = rig.submit(3)
    assert planned(rig) == []
    rig.now = 5.009
    assert planned(rig) == []
    rig.now = 5.010
    assert planned(rig) == [late]


def test_static_timer_starts_anew_after_a_batch_of_one_step() -> None:
    rig = static(max_batch_size=2, batch_wait_timeout_s=0.010)
    both = [rig.submit(3, max_tokens=1) for _ in range(2)]
    rig.now = 0.5
    plan = rig.plan()
    late = rig.submit(3)
    rig.commit(plan, rig.run(plan))
    assert list(rig.ends) == both
    rig.now = 1.0
    assert planned(rig) == []
    rig.now = 1.010
    assert planned(rig) == [late]


def test_static_request_during_a_batch_waits_for_the_timeout_again() -> None:
    rig = static(max_batch_size=2, batch_wait_timeout_s=0.010)
    first = [rig.submit(3, max_tokens=3) for _ in range(2)]
    assert planned(rig) == first
    late = rig.submit(3)
    for rig.now in (1.0, 2.0, 3.0):
        rig.step()
    assert rig.scheduler.status.running == 0 and planned(rig) == []
    assert rig.scheduler.next_wakeup(3.0) == 3.010
    rig.now = 3.010
    assert planned(rig) == [late]


def test_static_timer_of_an_aborted_request_is_not_inherited() -> None:
    rig = static(max_batch_size=2, batch_wait_timeout_s=0.010)
    gone = rig.submit(3)
    assert planned(rig) == []
    rig.scheduler.abort(gone.key)
    rig.now = 0.009
    rig.submit(3)
    rig.now = 0.012
    assert planned(rig) == []
    rig.now = 0.019
    assert len(planned(rig)) == 1


def test_static_members_join_at_once_even_if_the_step_is_too_small() -> None:
    rig = static(max_batch_size=3, batch_wait_timeout_s=0.0, max_step_tokens=4)
    a, b, c = rig.submit(5, max_tokens=3), rig.submit(5), rig.submit(5)
    assert planned(rig) == [a] and rig.scheduler.status.running == 3
    late = rig.submit(2)
    rig.step()
    assert planned(rig) == [a, b]
    rig.finish(60)
    assert rig.ends.keys() == {a, b, c, late} and late.history.admitted >= max(a.history.admitted, b.history.admitted)


def test_static_member_that_was_preempted_returns_into_its_batch() -> None:
    rig = static(max_batch_size=2, batch_wait_timeout_s=0.0, pages=6, watermark=0.0, prefix_cache=False)
    a, b = rig.submit(4, max_tokens=10), rig.submit(4, max_tokens=10)
    rig.step()
    late = rig.submit(1, max_tokens=1)
    rig.finish(100)
    assert b.history.preemptions > 0 and a.history.preemptions == 0
    assert list(rig.ends) == [a, b, late]


def test_whole_prefill_only_the_last_prompt_exceeds_the_budget() -> None:
    rig = Rig(use_chunked_prefill=False, max_step_tokens=10)
    a, b, c = rig.submit(8), rig.submit(30), rig.submit(3)
    assert shape(rig.plan()) == [(a, 0, 8), (b, 0, 30)]
    rig.step()
    assert shape(rig.plan()) == [(a, 8, 1), (b, 30, 1), (c, 0, 3)]


def test_fcfs_decodes_go_before_prompts() -> None:
    rig = Rig(max_step_tokens=4)
    a, b = rig.submit(1), rig.submit(1)
    rig.step()
    c = rig.submit(10)
    assert shape(rig.plan()) == [(a, 1, 1), (b, 1, 1), (c, 0, 2)]


def test_prefill_first_gives_prompts_the_step_and_decodes_the_rest() -> None:
    rig = Rig(max_step_tokens=4, scheduler_policy="prefill_first")
    a, b = rig.submit(1), rig.submit(1)
    rig.step()
    c = rig.submit(7)
    assert shape(rig.plan()) == [(c, 0, 4)]
    rig.step()
    assert shape(rig.plan()) == [(a, 1, 1), (c, 4, 3)], "decodes stand first in the step all the same"
    rig.step()
    assert members(rig.plan()) == [a, b, c]


def test_round_robin_in_a_small_step_decodes_advance_in_turn() -> None:
    rig = Rig(max_step_tokens=3, scheduler_policy="decode_round_robin")
    everyone = [rig.submit(1, max_tokens=20) for _ in range(5)]
    while any(sequence.output_len == 0 for sequence in everyone):
        rig.step()
    before = [sequence.output_len for sequence in everyone]
    for _ in range(5):
        assert len(rig.step()) == 3
    gained = [sequence.output_len - had for sequence, had in zip(everyone, before, strict=True)]
    assert sum(gained) == 15 and max(gained) - min(gained) <= 2


def test_round_robin_leaves_prompts_half_of_a_full_step() -> None:
    rig = Rig(max_step_tokens=4, scheduler_policy="decode_round_robin")
    decodes = [rig.submit(1, max_tokens=20) for _ in range(4)]
    rig.step()
    prompt = rig.submit(4)
    plan = rig.plan()
    assert shape(plan)[-1] == (prompt, 0, 2) and members(plan)[:-1] == decodes[:2]
    rig.commit(plan, rig.run(plan))
    plan = rig.plan()
    assert shape(plan)[-1] == (prompt, 2, 2) and members(plan)[:-1] == decodes[2:]


def test_round_robin_decodes_use_what_prompts_leave() -> None:
    rig = Rig(max_step_tokens=4, scheduler_policy="decode_round_robin")
    decodes = [rig.submit(1, max_tokens=20) for _ in range(4)]
    rig.step()
    assert members(rig.plan()) == decodes
    rig.submit(1)
    assert len(members(rig.plan())) == 4
