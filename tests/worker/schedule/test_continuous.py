"""Continuous batching and chunked prefill: who joins, who advances, in which order, within which limits."""

import pytest

from tests.worker.schedule.harness import Rig
from worker.schedule.sequence import Plan, Sequence


def shape(plan: Plan) -> list[tuple[Sequence, int, int]]:
    return [(chunk.sequence, chunk.start, chunk.length) for chunk in plan.chunks]


def members(plan: Plan) -> list[Sequence]:
    return [chunk.sequence for chunk in plan.chunks]


def test_new_ones_join_finished_ones_leave_at_every_step() -> None:
    rig = Rig()
    a, b, c = rig.submit(3, max_tokens=2), rig.submit(4), rig.submit(5)
    assert shape(rig.plan()) == [(a, 0, 3), (b, 0, 4), (c, 0, 5)]
    rig.step()
    assert shape(rig.plan()) == [(a, 3, 1), (b, 4, 1), (c, 5, 1)]
    rig.step()
    d = rig.submit(2)
    assert shape(rig.plan()) == [(b, 5, 1), (c, 6, 1), (d, 0, 2)]
    assert set(rig.ends) == {a}


def test_a_single_request_starts_at_once() -> None:
    rig = Rig(max_batch_size=8)
    a = rig.submit(3)
    assert rig.scheduler.next_wakeup(0.0) == 0.0
    assert members(rig.plan()) == [a]


def test_at_most_max_batch_size_run() -> None:
    rig = Rig(max_batch_size=2)
    a, b, c = rig.submit(3, max_tokens=1), rig.submit(3), rig.submit(3)
    assert members(rig.plan()) == [a, b]
    assert (rig.scheduler.status.running, rig.scheduler.status.waiting, rig.scheduler.status.waiting_tokens) == (
        2,
        1,
        3,
    )
    rig.step()
    assert members(rig.plan()) == [b, c]
    assert rig.scheduler.status.waiting_tokens == 0


def test_has_work_from_the_first_submit_to_the_last_end() -> None:
    rig = Rig(prefill_chunk_size=2)
    assert not rig.scheduler.has_work and not rig.plan()
    rig.submit(5, max_tokens=1)
    for _ in range(3):
        assert rig.scheduler.has_work
        rig.step()
    assert not rig.scheduler.has_work and not rig.plan()


def test_short_requests_do_not_wait_for_long_ones() -> None:
    rig = Rig()
    long, short = rig.submit(4, max_tokens=20), rig.submit(4, max_tokens=2)
    rig.step()
    rig.step()
    assert set(rig.ends) == {short} and rig.scheduler.get(long.key) is long


@pytest.mark.parametrize(("prompt", "chunks"), [(1, [1]), (3, [3]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (9, [4, 4, 1])])
def test_a_prompt_is_cut_and_only_its_last_chunk_samples(prompt: int, chunks: list[int]) -> None:
    rig = Rig(prefill_chunk_size=4)
    a = rig.submit(prompt)
    for index, length in enumerate(chunks):
        plan = rig.plan()
        last = index == len(chunks) - 1
        assert [chunk.length for chunk in plan.chunks] == [length] and bool(plan.sampling) == last
        assert len(rig.commit(plan, rig.run(plan))) == last, "nothing is told of a prompt that is not through"
        assert a.computed_tokens == sum(chunks[: index + 1])
    assert a.output_len == 1


def test_running_prompts_go_on_before_new_ones_start() -> None:
    rig = Rig(prefill_chunk_size=4, max_step_tokens=6)
    a, b = rig.submit(8), rig.submit(8)
    assert shape(rig.plan()) == [(a, 0, 4), (b, 0, 2)]
    rig.step()
    c = rig.submit(3)
    assert shape(rig.plan()) == [(a, 4, 4), (b, 2, 2)]
    rig.step()
    assert shape(rig.plan()) == [(a, 8, 1), (b, 4, 4), (c, 0, 1)]


def test_prompts_at_different_progress_share_a_step_with_decodes() -> None:
    rig = Rig(prefill_chunk_size=4)
    a = rig.submit(2)
    rig.step()
    b = rig.submit(10)
    rig.step()
    c = rig.submit(6)
    assert shape(rig.plan()) == [(a, 3, 1), (b, 4, 4), (c, 0, 4)]


def test_at_most_max_prefill_chunks_per_step_prompts_advance() -> None:
    rig = Rig(prefill_chunk_size=4, max_prefill_chunks_per_step=2)
    a, b, c = rig.submit(6), rig.submit(12), rig.submit(3)
    assert members(rig.plan()) == [a, b] and rig.scheduler.status.waiting == 1
    rig.step()
    assert members(rig.plan()) == [a, b]
    rig.step()
    assert shape(rig.plan()) == [(a, 6, 1), (b, 8, 4), (c, 0, 3)]


def test_unchunked_prompts_are_whole_and_only_the_last_exceeds_the_budget() -> None:
    rig = Rig(use_chunked_prefill=False, max_step_tokens=10)
    a, b, c = rig.submit(8), rig.submit(30), rig.submit(3)
    assert shape(rig.plan()) == [(a, 0, 8), (b, 0, 30)]
    rig.step()
    assert shape(rig.plan()) == [(a, 8, 1), (b, 30, 1), (c, 0, 3)]


def test_fcfs_decodes_come_before_prompts() -> None:
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


def test_round_robin_decodes_advance_in_turn_when_the_step_is_too_small() -> None:
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


def test_fcfs_a_later_request_that_would_fit_does_not_overtake() -> None:
    rig = Rig(pages=9, watermark=0.0, prefix_cache=False)
    a = rig.submit(20)
    rig.step()
    big, small = rig.submit(16), rig.submit(2)
    assert members(rig.plan()) == [a] and rig.scheduler.status.waiting == 2
    rig.scheduler.abort(a.key)
    assert members(rig.plan()) == [big, small]


def test_new_sequences_leave_the_watermark_to_running_ones_but_not_to_nobody() -> None:
    rig = Rig(pages=11, watermark=0.2, prefix_cache=False)
    a = rig.submit(36, max_tokens=1)  # 9 of 10 pages
    assert members(rig.plan()) == [a], "alone, a sequence may take what it needs"
    rig.step()
    b, c = rig.submit(28), rig.submit(4)  # 7 pages, and 1 more would leave 2
    d = rig.submit(4)
    assert members(rig.plan()) == [b, c]
    assert rig.scheduler.get(d.key) is d and rig.scheduler.status.waiting == 1


def test_a_whole_prompt_gets_its_pages_when_it_joins() -> None:
    rig = Rig(prefill_chunk_size=4, prefix_cache=False)
    a = rig.submit(18)
    rig.plan()
    assert len(a.pages) == 5


def test_decodes_get_pages_one_at_a_time() -> None:
    rig = Rig(page_size=3, prefix_cache=False)
    a = rig.submit(3, max_tokens=6)
    sizes = []
    while rig.scheduler.has_work:
        rig.step()
        sizes.append(len(a.pages))
    assert sizes == [1, 2, 2, 2, 3, 0]


def test_contiguous_is_one_page_a_sequence() -> None:
    rig = Rig(pages=3, page_size=64, prefix_cache=False, watermark=0.0)
    a, b, c = (rig.submit(10, max_tokens=54) for _ in range(3))
    assert members(rig.plan()) == [a, b], "every page can be used"
    rig.finish(200)
    assert c in rig.ends and a.preemptions == b.preemptions == c.preemptions == 0


def test_times_are_those_of_the_first_admission_and_the_first_token() -> None:
    rig = Rig(prefill_chunk_size=4)
    a = rig.submit(6)
    for rig.now in (1.0, 2.0, 3.0):
        rig.step()
    assert (a.admitted, a.first_token) == (1.0, 2.0)


def test_a_step_that_raised_is_planned_again_and_publishes_nothing() -> None:
    rig = Rig(prefill_chunk_size=4)
    a, b = rig.submit([1] * 9), rig.submit(3)
    first = rig.plan()
    rig.run(first)
    assert shape(rig.plan()) == shape(first)
    rig.scheduler.fail(a)
    rig.scheduler.check()
    assert rig.pool.counts().cached == 0
    assert members(rig.plan()) == [b]


def test_a_plan_can_be_committed_in_part() -> None:
    rig = Rig()
    a, b = rig.submit(3), rig.submit(3)
    plan = rig.plan()
    half = Plan(chunks=plan.chunks[:1])
    rig.commit(half, rig.run(half))
    assert (a.output_len, b.output_len) == (1, 0)
    assert shape(rig.plan()) == [(a, 3, 1), (b, 0, 3)]


def test_a_sequence_that_left_during_the_step_is_passed_over() -> None:
    rig = Rig()
    a, b = rig.submit(3), rig.submit(4)
    plan = rig.plan()
    ids = rig.run(plan)
    rig.scheduler.abort(a.key)
    assert [advance.sequence for advance in rig.commit(plan, ids)] == [b]
    assert a.output_len == 0


def test_ids_that_do_not_fit_and_plans_committed_twice_are_errors() -> None:
    rig = Rig()
    a = rig.submit(3)
    plan = rig.plan()
    ids = rig.run(plan)
    rig.scheduler.launched(plan)
    with pytest.raises(ValueError, match="samples 1 tokens, but 2"):
        rig.scheduler.update(plan, [1, 2], 0.0)
    assert a.computed_tokens == 0
    rig.scheduler.update(plan, ids, 0.0)
    with pytest.raises(ValueError, match="moved on"):
        rig.scheduler.launched(plan)
    assert a.output_len == 1
