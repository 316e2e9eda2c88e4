"""The scheduler: which sequences join a step, in which order and within which limits, and how they end."""

import pytest

from shared.messages import Outcome
from tests.worker.scheduler.harness import EOS, Rig, SlowMask, commit, feed, members, shape
from worker.scheduler.host_budget import HostWork
from worker.scheduler.sequence import Plan

STOP = 7
OTHER = 5


def test_plan_new_sequences_join_and_finished_ones_leave_at_every_step() -> None:
    rig = Rig()
    a, b, c = rig.submit(3, max_tokens=2), rig.submit(4), rig.submit(5)
    assert shape(rig.plan()) == [(a, 0, 3), (b, 0, 4), (c, 0, 5)]
    rig.step()
    assert shape(rig.plan()) == [(a, 3, 1), (b, 4, 1), (c, 5, 1)]
    rig.step()
    d = rig.submit(2)
    assert shape(rig.plan()) == [(b, 5, 1), (c, 6, 1), (d, 0, 2)]
    assert set(rig.ends) == {a}


def test_plan_single_request_starts_at_once() -> None:
    rig = Rig(max_batch_size=8)
    a = rig.submit(3)
    assert rig.scheduler.next_wakeup(0.0) == 0.0
    assert members(rig.plan()) == [a]


def test_plan_runs_at_most_max_batch_size() -> None:
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


def test_has_work_from_first_submit_to_last_end() -> None:
    rig = Rig(prefill_chunk_size=2)
    assert not rig.scheduler.has_work and not rig.plan()
    rig.submit(5, max_tokens=1)
    for _ in range(3):
        assert rig.scheduler.has_work
        rig.step()
    assert not rig.scheduler.has_work and not rig.plan()


def test_short_request_beside_a_long_one_ends_first() -> None:
    rig = Rig()
    long, short = rig.submit(4, max_tokens=20), rig.submit(4, max_tokens=2)
    rig.step()
    rig.step()
    assert set(rig.ends) == {short} and rig.scheduler.state.live.get(long.key) is long


@pytest.mark.parametrize(("prompt", "chunks"), [(1, [1]), (3, [3]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (9, [4, 4, 1])])
def test_plan_long_prompt_is_cut_and_only_its_last_chunk_samples(prompt: int, chunks: list[int]) -> None:
    rig = Rig(prefill_chunk_size=4)
    a = rig.submit(prompt)
    for index, length in enumerate(chunks):
        plan = rig.plan()
        last = index == len(chunks) - 1
        assert [chunk.length for chunk in plan.chunks] == [length] and bool(plan.sampling) == last
        assert len(rig.commit(plan, rig.run(plan))) == last, "a prompt that is not complete has no update"
        assert a.computed_tokens == sum(chunks[: index + 1])
    assert a.output_len == 1


def test_plan_running_prompts_go_before_new_ones() -> None:
    rig = Rig(prefill_chunk_size=4, max_step_tokens=6)
    a, b = rig.submit(8), rig.submit(8)
    assert shape(rig.plan()) == [(a, 0, 4), (b, 0, 2)]
    rig.step()
    c = rig.submit(3)
    assert shape(rig.plan()) == [(a, 4, 4), (b, 2, 2)]
    rig.step()
    assert shape(rig.plan()) == [(a, 8, 1), (b, 4, 4), (c, 0, 1)]


def test_plan_mixes_decodes_with_prompts_at_different_progress() -> None:
    rig = Rig(prefill_chunk_size=4)
    a = rig.submit(2)
    rig.step()
    b = rig.submit(10)
    rig.step()
    c = rig.submit(6)
    assert shape(rig.plan()) == [(a, 3, 1), (b, 4, 4), (c, 0, 4)]


def test_plan_has_at_most_max_prefill_chunks_per_step() -> None:
    rig = Rig(prefill_chunk_size=4, max_prefill_chunks_per_step=2)
    a, b, c = rig.submit(6), rig.submit(12), rig.submit(3)
    assert members(rig.plan()) == [a, b] and rig.scheduler.status.waiting == 1
    rig.step()
    assert members(rig.plan()) == [a, b]
    rig.step()
    assert shape(rig.plan()) == [(a, 6, 1), (b, 8, 4), (c, 0, 3)]


def test_plan_later_request_that_fits_does_not_overtake() -> None:
    rig = Rig(pages=9, watermark=0.0, prefix_cache=False)
    a = rig.submit(20)
    rig.step()
    big, small = rig.submit(16), rig.submit(2)
    assert members(rig.plan()) == [a] and rig.scheduler.status.waiting == 2
    rig.scheduler.abort(a.key)
    assert members(rig.plan()) == [big, small]


def test_plan_new_sequences_respect_the_watermark_unless_alone() -> None:
    rig = Rig(pages=11, watermark=0.2, prefix_cache=False)
    a = rig.submit(36, max_tokens=1)  # needs 9 of 10 pages
    assert members(rig.plan()) == [a], "alone, a sequence may take what it needs"
    rig.step()
    b, c = rig.submit(28), rig.submit(4)  # 7 pages and 1 page, which leave 2 of 10
    d = rig.submit(4)
    assert members(rig.plan()) == [b, c]
    assert rig.scheduler.state.live.get(d.key) is d and rig.scheduler.status.waiting == 1


def test_plan_joining_prompt_gets_all_its_pages() -> None:
    rig = Rig(prefill_chunk_size=4, prefix_cache=False)
    a = rig.submit(18)
    rig.plan()
    assert len(a.pages[0]) == 5


def test_plan_decodes_get_pages_one_at_a_time() -> None:
    rig = Rig(page_size=3, prefix_cache=False)
    a = rig.submit(3, max_tokens=6)
    sizes = []
    while rig.scheduler.has_work:
        rig.step()
        sizes.append(sum(map(len, a.pages)))
    assert sizes == [1, 2, 2, 2, 3, 0]


def test_plan_contiguous_backend_uses_one_page_per_sequence() -> None:
    rig = Rig(pages=3, page_size=64, prefix_cache=False, watermark=0.0)
    a, b, c = (rig.submit(10, max_tokens=54) for _ in range(3))
    assert members(rig.plan()) == [a, b], "every page can be used"
    rig.finish(200)
    assert c in rig.ends and a.history.preemptions == b.history.preemptions == c.history.preemptions == 0


def test_sequence_times_are_first_admission_and_first_token() -> None:
    rig = Rig(prefill_chunk_size=4)
    a = rig.submit(6)
    for rig.now in (1.0, 2.0, 3.0):
        rig.step()
    assert (a.history.admitted, a.history.first_token) == (1.0, 2.0)


def test_plan_after_a_failed_step_repeats_it_and_publishes_nothing() -> None:
    rig = Rig(prefill_chunk_size=4)
    a, b = rig.submit([1] * 9), rig.submit(3)
    first = rig.plan()
    rig.run(first)
    assert shape(rig.plan()) == shape(first)
    rig.scheduler.fail(a)
    rig.scheduler.check()
    assert rig.pool.counts().cached == 0
    assert members(rig.plan()) == [b]


def test_update_of_part_of_a_plan_applies_only_that_part() -> None:
    rig = Rig()
    a, b = rig.submit(3), rig.submit(3)
    plan = rig.plan()
    half = Plan(chunks=plan.chunks[:1])
    rig.commit(half, rig.run(half))
    assert (a.output_len, b.output_len) == (1, 0)
    assert shape(rig.plan()) == [(a, 3, 1), (b, 0, 3)]


def test_update_skips_a_sequence_that_left_during_the_step() -> None:
    rig = Rig()
    a, b = rig.submit(3), rig.submit(4)
    plan = rig.plan()
    ids = rig.run(plan)
    rig.scheduler.abort(a.key)
    assert [update.sequence for update in rig.commit(plan, ids)] == [b]
    assert a.output_len == 0


def test_update_with_wrong_ids_or_a_repeated_plan_raises() -> None:
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


@pytest.mark.parametrize("prompt", [1, 5, 9])
def test_max_tokens_0_computes_the_prompt_and_samples_nothing(prompt: int) -> None:
    rig = Rig(prefill_chunk_size=4)
    sequence = rig.submit(prompt, max_tokens=0)
    updates = []
    while rig.scheduler.has_work:
        plan = rig.plan()
        assert not plan.sampling
        updates += rig.commit(plan, [])
    ((only),) = updates
    assert (only.sequence, only.tokens, only.outcome) == (sequence, [], Outcome.LENGTH)
    assert sequence.computed_tokens == prompt and sequence.history.first_token == 0.0


def test_resumed_stream_computes_its_output_and_samples_the_next_token() -> None:
    rig = Rig(prefill_chunk_size=4)
    sequence = rig.submit(3, max_tokens=6, generated=(OTHER, OTHER, OTHER, OTHER))
    assert [chunk.length for chunk in rig.plan().chunks] == [4]
    commit(rig.scheduler, rig.plan(), [], 0.0)
    assert feed(rig, sequence, [OTHER]) is None
    assert feed(rig, sequence, [OTHER]) == Outcome.LENGTH
    assert sequence.output_len == 6


@pytest.mark.parametrize(
    ("generated", "outcome"),
    [((OTHER, OTHER), Outcome.LENGTH), ((EOS,), Outcome.EOS), ((STOP,), Outcome.STOP), ((EOS, OTHER), Outcome.LENGTH)],
)
def test_resumed_complete_stream_ends_without_another_token(generated: tuple[int, ...], outcome: Outcome) -> None:
    rig = Rig(eos_token_ids=frozenset({EOS}))
    rig.submit(3, max_tokens=2, generated=generated, stop_token_ids=(STOP,))
    plan = rig.plan()
    assert plan and not plan.sampling
    (update,) = commit(rig.scheduler, plan, [], 0.0)
    assert (update.tokens, update.outcome) == ([], outcome)


def test_abort_frees_pages_at_once_and_is_idempotent() -> None:
    rig = Rig(max_batch_size=1)
    runs, waits = rig.submit(9), rig.submit(9)
    rig.plan()
    assert rig.scheduler.abort(waits.key) is waits and rig.scheduler.status.waiting_tokens == 0
    assert rig.scheduler.abort(runs.key) is runs and rig.pool.counts().owned == 0
    assert rig.scheduler.abort(runs.key) is None
    assert rig.scheduler.abort((b"unknown", 1)) is None
    rig.scheduler.check()
    assert not rig.scheduler.has_work


def test_fail_of_a_sequence_that_left_does_nothing() -> None:
    rig = Rig()
    gone = rig.submit(3)
    rig.scheduler.abort(gone.key)
    again = rig.sequence(3)
    again.key = gone.key
    rig.scheduler.submit(again, 0.0)
    rig.scheduler.fail(gone)
    assert rig.scheduler.state.live.get(again.key) is again


def test_expire_ends_waiting_and_running_sequences() -> None:
    rig = Rig(max_batch_size=1)
    runs, waits, free = rig.submit(3, deadline=2.0), rig.submit(3, deadline=1.0), rig.submit(3)
    rig.step()
    assert rig.scheduler.expire(0.9) == []
    assert rig.scheduler.expire(1.0) == [waits]
    assert rig.scheduler.expire(5.0) == [runs]
    assert rig.scheduler.expire(9.0) == [] and rig.scheduler.sequences() == [free]
    rig.scheduler.check()


def test_next_wakeup_of_a_forming_batch_is_its_first_deadline() -> None:
    rig = Rig(batching_mode="static", batch_wait_timeout_s=3.0)
    assert rig.scheduler.next_wakeup(0.0) == float("inf")
    rig.submit(3, deadline=2.0)
    assert not rig.plan() and rig.scheduler.next_wakeup(0.0) == 2.0
    rig.scheduler.expire(2.0)
    assert rig.scheduler.next_wakeup(2.0) == float("inf")


def test_next_wakeup_of_rows_that_wait_for_their_masks_is_the_first_deadline() -> None:
    """A mask that is there wakes the loop. If it planned again and again, another tenant would soon be forgotten."""
    rig = Rig()
    heavy, other = rig.submit(3, tenant="a", deadline=9.0), rig.submit(3, max_tokens=2, tenant="b")
    rig.step()
    mask = SlowMask()
    heavy.host, heavy.constraint = HostWork(mask=0.1), mask  # type: ignore[assignment]
    while other not in rig.ends:
        assert rig.scheduler.next_wakeup(rig.now) == rig.now
        rig.step()
    assert not rig.plan() and rig.scheduler.next_wakeup(rig.now) == 9.0
    mask.ready = True
    assert members(rig.plan()) == [heavy] and rig.scheduler.next_wakeup(rig.now) == rig.now


def test_reset_prefix_cache_leaves_running_sequences_alone() -> None:
    rig = Rig()
    running = rig.submit(list(range(40)), max_tokens=12)
    rig.step()
    pages = running.pages[0].tolist()
    rig.scheduler.reset_prefix_cache(77)
    assert rig.scheduler.status.prefix_cache_reset == 77
    assert running.pages[0].tolist() == pages
    again = rig.submit(list(range(40)))
    rig.step()
    assert not set(again.pages[0].tolist()) & set(pages), "it shares nothing that was computed before"
    while rig.scheduler.has_work:
        rig.step()
    assert running.output_len == 12
