"""The counts of a sequence, and the plan of a step."""

from tests.worker.scheduler.harness import Rig
from worker.scheduler.sequence import Chunk, Plan


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
