"""Slots for recurrent states: a sequence's slots, checkpoints, and prompts that continue from checkpoints."""

import pytest

from tests.worker.scheduler.harness import Rig, shape
from worker.kv_cache.pages import PagePool
from worker.scheduler.recurrent_slots import States
from worker.scheduler.sequence import PromptScores, Sequence, slots_of

PROMPT = list(range(100, 130))  # seven and a half pages of 4 tokens; its last full page ends at 28


def rig(slots: int = 20, **options: object) -> Rig:
    settings = {"pages": 65, "prefill_chunk_size": 10, "state_checkpoint_tokens": 12, **options}
    return Rig(slots=slots, **settings)  # type: ignore[arg-type]


def starts(one: Rig, sequence: Sequence) -> list[int]:
    """Runs a sequence to its end. Returns the positions at which its chunks began."""
    found: list[int] = []
    while sequence not in one.ends:
        plan = one.plan()
        found += [chunk.start for chunk in plan.chunks if chunk.sequence is sequence]
        one.commit(plan, one.run(plan))
    return found


def cached(one: Rig) -> int:
    assert one.slots is not None
    return one.slots.counts().cached


def test_chunk_ends_at_checkpoints_and_at_the_last_full_page_of_the_prompt() -> None:
    one = rig()
    assert starts(one, one.submit(PROMPT, 3)) == [0, 10, 12, 22, 24, 28, 30, 31]
    assert cached(one) == 3, "after 12, 24 and 28 tokens"


def test_decodes_leave_checkpoints_too() -> None:
    one = rig()
    one.submit(PROMPT[:10], 30, ignore_eos=True)
    one.finish(60)
    assert cached(one) == 4, "after 8, 12, 24 and 36 tokens"


def test_interval_is_rounded_up_to_whole_pages() -> None:
    one = rig(state_checkpoint_tokens=5)
    assert starts(one, one.submit(PROMPT[:20], 0)) == [0, 8, 16]


@pytest.mark.parametrize(
    ("other", "hit"),
    [
        (PROMPT, 28),
        ([*PROMPT, 7, 8], 28),
        ([*PROMPT[:29], 7], 28),
        ([*PROMPT[:28], 7], 28),
        (PROMPT[:28], 24),
        ([*PROMPT[:27], 7, 8], 24),
        ([*PROMPT[:24], 7], 24),
        ([*PROMPT[:23], 7, 8], 12),
        (PROMPT[:13], 12),
        (PROMPT[:12], 0),
        ([*PROMPT[:11], 7, 8], 0),
    ],
)
def test_prefix_hit_continues_from_the_last_checkpoint(other: list[int], hit: int) -> None:
    one = rig()
    one.submit(PROMPT, 1)
    one.finish(20)
    again = one.submit(other, 6)
    one.plan()
    assert again.computed_tokens == again.prefix.cached_tokens == hit
    assert list(slots_of(again).at) == ([hit] if hit else []) and len(slots_of(again).free) == 2
    one.finish(30)


def test_other_ends_of_a_scored_prompt_continue_before_the_first_of_them() -> None:
    one = rig()
    cached = []
    for end in (7, 8):
        scored = one.submit([*PROMPT[:20], *[end] * 9], 1, prompt_logprobs=True)
        scored.scores = PromptScores(21)
        one.plan()
        cached.append(scored.prefix.cached_tokens)
        one.finish(20)
    assert cached == [0, 20]


def test_next_turn_of_a_conversation_hits_the_answer() -> None:
    one = rig()
    first = one.submit(PROMPT, 20, ignore_eos=True)
    one.finish(40)
    following = one.submit([*first.tokens, 7, 8, 9], 3)
    one.plan()
    assert following.prefix.cached_tokens == 48


def test_hit_needs_the_pages_as_well() -> None:
    one = rig()
    one.submit(PROMPT, 1)
    one.finish(20)
    pool = one.pool
    fresh = pool.acquire(pool.counts().free + 2) or []  # evicts the last two of the cached pages
    pool.release(fresh)
    again = one.submit(PROMPT, 3)
    one.plan()
    assert again.prefix.cached_tokens == 12, "without the page up to 24"
    one.finish(20)


def test_checkpoint_is_read_by_several_sequences_and_never_written() -> None:
    one = rig()
    one.submit(PROMPT, 1)
    one.finish(20)
    both = [one.submit([*PROMPT, 5 + i], 8) for i in range(2)]
    one.plan()
    slots = [slots_of(sequence).at[28] for sequence in both]
    assert slots[0] == slots[1] and one.slots is not None and one.slots.owners()[slots[0]] == 2
    one.finish(40)
    assert not one.slots.owners()


def test_checkpoint_is_skipped_if_no_slot_takes_its_place() -> None:
    one = rig(slots=5, max_batch_size=2)
    two = [one.submit(PROMPT, 4), one.submit([7, *PROMPT], 4)]
    assert starts(one, two[0])[:3] == [0, 10, 12] and cached(one) == 0
    one.finish(40)


def test_sequence_waits_for_slots_and_a_checkpoint_makes_way() -> None:
    one = rig(slots=4)
    first = one.submit(PROMPT, 4)
    one.step()
    second = one.submit([7, *PROMPT], 4)
    one.step()
    assert not second.pages and first.pages, "three slots are enough for one of them"
    one.finish(60)
    assert len(one.ends) == 2


def test_last_slots_are_enough_for_a_sequence_that_begins_with_a_cached_state() -> None:
    one = rig(slots=4)
    one.submit(PROMPT, 1)
    one.finish(20)
    again = one.submit(PROMPT, 2)
    one.plan()
    assert again.prefix.cached_tokens == 28
    one.finish(20)


def test_discarded_steps_are_planned_again_from_the_same_state() -> None:
    one = rig(overlap=True)
    sequence = one.submit(PROMPT, 4)
    one.step()
    one.step()
    one.launch(one.plan())
    assert sorted(slots_of(sequence).at) == [10, 12, 22] and not slots_of(sequence).free
    one.in_flight.clear()
    one.scheduler.discard_in_flight()
    assert sorted(slots_of(sequence).at) == [10] and len(slots_of(sequence).free) == 2
    assert shape(one.plan()) == [(sequence, 10, 2)]
    one.finish(40)


def test_preempted_sequence_resumes_from_its_last_checkpoint() -> None:
    one = rig()
    sequence = one.submit(PROMPT, 9, ignore_eos=True)
    for _ in range(4):
        one.step()
    assert sequence.computed_tokens == 24
    plan = one.plan()
    assert shape(plan) == [(sequence, 24, 4)]
    one.run(plan)
    one.scheduler.state.preempt(sequence, one.now)
    assert sequence.states is None
    one.plan()
    assert sequence.computed_tokens == 24
    one.finish(40)


def test_without_prefix_cache_nothing_is_published_and_no_chunk_is_cut() -> None:
    one = rig(prefix_cache=False)
    assert starts(one, one.submit(PROMPT, 1)) == [0, 10, 20]
    assert cached(one) == 0


def test_pool_that_cannot_hold_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence needs 3 slots, but there are 2"):
        States(PagePool(3, 4), 4, 12, overlap=False)
