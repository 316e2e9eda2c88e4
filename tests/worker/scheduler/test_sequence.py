"""The counts of a sequence, and the plan of a step."""

from tests.worker.scheduler.harness import Rig
from worker.scheduler.sequence import NO_ID, Chunk, Plan, accepted_ids


def test_sequence_counts_follow_its_tokens() -> None:
    sequence = Rig().sequence(3, generated=(7, 8))
    assert (sequence.output_len, sequence.next_output, sequence.uncomputed_tokens) == (2, 2, 5)
    sequence.computed_tokens, sequence.in_flight_tokens, sequence.pending_outputs = 4, 1, 1
    assert (sequence.output_len, sequence.next_output, sequence.uncomputed_tokens) == (2, 3, 1)


def test_plan_rows_are_those_of_sampling_chunks_and_their_drafts() -> None:
    rig = Rig()
    decode, prompt, last = rig.sequence(3, generated=(7,)), rig.sequence(9), rig.sequence(4)
    plan = Plan([Chunk(decode, 3, 3, True, (1, 2)), Chunk(prompt, 0, 4, False), Chunk(last, 0, 4, True)])
    assert plan.rows == [(decode, 1, ()), (decode, 2, (1,)), (decode, 3, (1, 2)), (last, 0, ())]
    assert [chunk.rows for chunk in plan.chunks] == [3, 0, 1]
    assert (plan.tokens, plan.drafts) == (11, 2) and plan.sampling == [plan.chunks[0], plan.chunks[2]]


def test_plan_without_chunks_is_false() -> None:
    assert not Plan(preempted=[Rig().sequence(3)])


def test_accepted_ids_end_at_the_first_that_differs_and_before_a_row_without_an_id() -> None:
    assert accepted_ids([4, 5, 6], (4, 5)) == [4, 5, 6] and accepted_ids([4, 9, 6], (4, 5)) == [4, 9]
    assert accepted_ids([4, 5, NO_ID], (4, 5)) == [4, 5] and accepted_ids([4, NO_ID, 6], (4, 5)) == [4]
    assert accepted_ids([9, NO_ID, NO_ID], (4, 5)) == [9]
