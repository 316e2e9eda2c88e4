"""The scheduler with steps in flight: the next plan continues from these steps, and no step is applied twice."""

import pytest

from shared.messages import Outcome
from tests.worker.scheduler.harness import EOS, Rig, members, shape


def test_plan_goes_on_from_where_the_step_in_flight_will_end() -> None:
    rig = Rig(prefill_chunk_size=4, overlap=True)
    a, b = rig.submit(3), rig.submit(6)
    rig.step()
    assert (a.computed_tokens, a.output_len, a.next_output) == (0, 0, 1), "nothing counts before update()"
    assert shape(rig.plan()) == [(a, 3, 1), (b, 4, 2)]
    (first,) = rig.step()
    assert first.sequence is a and a.output_len == 1 and (a.in_flight_tokens, a.pending_outputs) == (1, 1)
    assert shape(rig.plan()) == [(a, 4, 1), (b, 6, 1)]


@pytest.mark.parametrize(("max_tokens", "max_seq_len"), [(1, 64), (2, 64), (3, 64), (3, 8)])
def test_plan_computes_no_row_beyond_the_final_length(max_tokens: int, max_seq_len: int) -> None:
    rig = Rig(overlap=True, max_seq_len=max_seq_len, max_batch_size=1)
    sequence = rig.submit(5, max_tokens, ignore_eos=True)
    rows = 0
    while rig.scheduler.has_work:
        rows += rig.plan().tokens
        rig.step()
    assert rig.ends == {sequence: Outcome.LENGTH} and not rig.in_flight
    assert rows == len(sequence.tokens) - 1


def test_prompt_that_samples_nothing_ends_once() -> None:
    rig = Rig(overlap=True)
    sequence = rig.submit(5, max_tokens=0)
    rig.step()
    assert not rig.plan(), "its end is in flight"
    (end,) = rig.step()
    assert (end.sequence, end.tokens, end.outcome) == (sequence, [], Outcome.LENGTH)


def test_update_after_an_eos_drops_the_one_row_computed_behind_it() -> None:
    rig = Rig(pages=4, page_size=2, overlap=True, prefix_cache=False)
    sequence = rig.submit(3, max_tokens=3)
    other = rig.sequence(2, max_tokens=2)
    rig.launch(rig.plan())
    rig.launch(rig.plan())
    (first, _), (second, _) = rig.in_flight
    rig.in_flight.clear()
    updates = rig.scheduler.update(first, [EOS], rig.now)
    assert updates[0].outcome is None, "the rig has no eos: this one goes on"
    assert rig.scheduler.abort(sequence.key) and rig.pool.counts().owned == 0
    rig.scheduler.submit(other, rig.now)
    taken = rig.plan()
    assert set(other.pages[0]) <= {1, 2, 3} and members(taken) == [other], "its pages are in use again"
    rig.scheduler.launched(taken)
    assert rig.scheduler.update(second, [5], rig.now) == [] and sequence.tokens[3:] == [EOS]
    assert other.pending_outputs == 1 and other.output_len == 0
    rig.scheduler.check()


def test_update_ends_at_the_eos_whatever_was_launched_behind() -> None:
    rig = Rig(overlap=True, eos_token_ids=frozenset({EOS}), max_seq_len=64)
    every = [rig.submit([i, 3 * i % 7, 5], max_tokens=50) for i in range(1, 20)]
    rig.finish(400)
    outcomes = set(rig.ends.values())
    assert set(rig.ends) == set(every) and outcomes == {Outcome.EOS}, "as the reference has it, in check_updates()"
    assert rig.pool.counts().owned == 0


def test_preempted_sequence_loses_ids_in_flight_and_samples_them_again() -> None:
    rig = Rig(pages=5, page_size=2, overlap=True, prefix_cache=False, watermark=0.0)
    old, new = rig.submit([1, 2, 3], max_tokens=6, ignore_eos=True), rig.submit([4, 5, 6], 4, ignore_eos=True)
    rig.step()
    rig.step()
    plan = rig.plan()
    assert plan.preempted == [new] and members(plan) == [old] and new.output_len == 1
    rig.launch(plan)
    assert [update.sequence for update in rig.finish_steps(keep=1)] == [old], "the step in flight had both"
    assert new.output_len == 1 and not new.pages
    rig.finish(60)
    assert set(rig.ends) == {old, new}, "with the reference's tokens"


def test_full_page_is_published_by_update() -> None:
    rig = Rig(page_size=4, overlap=True)
    rig.submit([1, 2, 3, 4, 5], max_tokens=8, ignore_eos=True)
    rig.launch(rig.plan())
    assert rig.scheduler.submit(second := rig.sequence([1, 2, 3, 4, 5], 2, ignore_eos=True), rig.now) is None
    rig.launch(rig.plan())
    assert second.prefix.cached_tokens == 0, "the step may still fail"
    rig.finish_steps()
    rig.scheduler.submit(third := rig.sequence([1, 2, 3, 4, 5], 2, ignore_eos=True), rig.now)
    rig.plan()
    assert third.prefix.cached_tokens == 4


def test_discard_in_flight_plans_the_same_work_again() -> None:
    rig = Rig(overlap=True)
    a, b = rig.submit(3), rig.submit(6)
    rig.step()
    first = shape(rig.in_flight[0][0])
    rig.launch(rig.plan())
    rig.scheduler.discard_in_flight()
    rig.in_flight.clear()
    assert shape(rig.plan()) == first and (a.output_len, b.output_len) == (0, 0)


def test_launched_plan_that_does_not_continue_raises() -> None:
    rig = Rig(overlap=True)
    a = rig.submit(3)
    plan = rig.plan()
    rig.launch(plan)
    with pytest.raises(ValueError, match="moved on"):
        rig.scheduler.launched(plan)
    assert (a.in_flight_tokens, a.pending_outputs) == (3, 1)
    with pytest.raises(ValueError, match="samples 1 tokens, but 2"):
        rig.scheduler.update(plan, [1, 2], rig.now)
    assert len(rig.finish_steps()) == 1
