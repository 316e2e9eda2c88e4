"""The scheduler of a model in stages: several steps in flight that share no sequence with an unknown id."""

from unittest.mock import patch

import pytest

from shared.messages import Outcome
from tests.worker.scheduler.harness import Rig, members, shape
from worker.scheduler import pipeline
from worker.scheduler.sequence import Plan, Sequence


def launched(rig: Rig) -> Plan:
    plan = rig.plan()
    rig.launch(plan)
    return plan


def decoding(rig: Rig, count: int) -> list[Sequence]:
    """Returns sequences whose prompts are computed."""
    found = [rig.submit(3, 40, ignore_eos=True) for _ in range(count)]
    rig.launch(rig.plan())
    rig.finish_steps()
    assert all(sequence.output_len == 1 for sequence in found)
    return found


@pytest.mark.parametrize(
    ("count", "shares"), [(4, (2, 2)), (5, (3, 2)), (7, (3, 2, 2)), (4, (2, 1, 1)), (2, (1, 1)), (1, (1,))]
)
def test_decodes_are_shared_among_steps_in_flight(count: int, shares: tuple[int, ...]) -> None:
    rig = Rig(stages=max(2, len(shares)))
    found = decoding(rig, count)
    batches = [members(launched(rig)) for _ in shares]
    assert tuple(map(len, batches)) == shares and [one for batch in batches for one in batch] == found
    assert not rig.plan(), "the next token of each is unknown"
    rig.finish_steps(keep=len(shares) - 1)
    assert members(rig.plan()) == batches[0]


def test_batches_become_equal_again_when_sequences_have_left() -> None:
    rig = Rig(stages=2)
    found = decoding(rig, 8)
    assert [members(launched(rig)) for _ in range(2)] == [found[:4], found[4:]]
    for sequence in found[1:4]:
        rig.scheduler.abort(sequence.key)
    sizes = []
    for _ in range(6):
        rig.finish_steps(keep=1)
        sizes.append(len(members(launched(rig))))
    assert sizes == [1, 3, 2, 3, 2, 3]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_decode_is_left_out_of_as_many_steps_as_there_are_stages(stages: int) -> None:
    """Even if sequences come and go."""
    rig = Rig(stages=stages, pages=400, max_seq_len=200, max_batch_size=20)
    every, batches, last = decoding(rig, 2), list[list[Sequence]](), dict[Sequence, int]()
    for number in range(120):
        if number % 3 == 0:
            every.append(rig.submit(3, 4 + number % 10, ignore_eos=True))
        if number % 11 == 10 and (live := rig.scheduler.sequences()):
            rig.scheduler.abort(live[number % len(live)].key)
        before = {one: len(one.tokens) for one in every}
        rig.step()
        batches.append(members(rig.in_flight[-1][0]) if rig.in_flight else [])
        for one in batches[-1]:
            last[one] = number
        waits = [one for one in every if before[one] > one.prompt_len and one in rig.scheduler.state.running]
        assert all(number - last[one] < 2 * stages for one in waits if one in last)
    assert len(rig.ends) > 20 and max(map(len, batches)) > 2


def test_sequence_alone_is_planned_as_without_stages() -> None:
    shapes = []
    for count in (1, 3):
        rig, found = Rig(stages=count, prefill_chunk_size=4), []
        sequence = rig.submit(10, 6, ignore_eos=True)
        for _ in range(40):
            plan = rig.plan()
            found += [(start, length) for _, start, length in shape(plan)]
            if plan:
                rig.launch(plan)
            rig.finish_steps(keep=rig.kept(plan))
        assert rig.ends == {sequence: Outcome.LENGTH}
        shapes.append(found)
    assert shapes[0] == shapes[1]


def test_next_chunk_of_a_prompt_is_in_flight_behind_the_last_one() -> None:
    rig = Rig(stages=3, prefill_chunk_size=4)
    prompt = rig.submit(10, 4)
    assert [shape(launched(rig)) for _ in range(3)] == [[(prompt, 0, 4)], [(prompt, 4, 4)], [(prompt, 8, 2)]]
    assert not rig.plan(), "its next token is unknown"
    assert [update.tokens for update in rig.finish_steps()] == [prompt.tokens[10:]]


def test_prompts_are_shared_among_steps_if_they_are_long_enough() -> None:
    with patch.object(pipeline, "LEAST_PROMPT_TOKENS", 6):
        rig = Rig(stages=2)
        first, second, third = (rig.submit(8) for _ in range(3))
        assert shape(launched(rig)) == [(first, 0, 8), (second, 0, 4)]
        assert shape(launched(rig)) == [(second, 4, 4), (third, 0, 8)]
        rig.finish(100)
        small = [rig.submit(2, 1) for _ in range(3)]
        assert members(launched(rig)) == small, "six tokens are not cut"


@pytest.mark.parametrize(("options", "most"), [({"slots": 9}, 1), ({"windows": {5: 65}}, 2), ({}, 4)])
def test_sequence_has_no_more_chunks_in_flight_than_it_has_slots_and_pages_for(
    options: dict[str, object], most: int
) -> None:
    rig = Rig(stages=4, prefill_chunk_size=4, **options)  # type: ignore[arg-type]
    prompt = rig.submit(20, 3)
    plans = [launched(rig) for _ in range(4) if rig.plan()]
    assert len(plans) == most
    rig.finish(30)
    assert set(rig.ends) == {prompt}


def test_sequence_that_runs_again_after_a_preemption_ignores_its_old_step_in_flight() -> None:
    rig = Rig(pages=5, page_size=2, stages=3, prefix_cache=False, watermark=0.0)
    old, new = rig.submit([1, 2, 3], 6, ignore_eos=True), rig.submit([4, 5, 6], 6, ignore_eos=True)
    launched(rig)
    rig.finish_steps()
    assert [members(launched(rig)) for _ in range(2)] == [[old], [new]]
    rig.finish_steps(keep=1)
    plan = launched(rig)
    assert (plan.preempted, members(plan)) == ([new], [old]) and new.output_len == 1
    rig.scheduler.abort(old.key)
    assert shape(launched(rig)) == [(new, 0, 4)], "its old step is not read yet"
    assert [update.tokens for update in rig.finish_steps()] == [new.tokens[4:5]]
    rig.finish(40)
    assert set(rig.ends) == {new} and not rig.scheduler.state.outdated, "with the reference's tokens"


def test_preempted_sequence_is_planned_after_its_steps_were_discarded() -> None:
    rig = Rig(pages=5, page_size=2, stages=3, prefix_cache=False, watermark=0.0)
    old, new = rig.submit([1, 2, 3], 3, ignore_eos=True), rig.submit([4, 5, 6], 3, ignore_eos=True)
    launched(rig)
    rig.finish_steps()
    assert [members(launched(rig)) for _ in range(2)] == [[old], [new]]
    rig.finish_steps(keep=1)
    assert rig.plan().preempted == [new]
    rig.in_flight.clear()
    rig.scheduler.discard_in_flight()
    rig.finish(40)
    assert set(rig.ends) == {old, new}


def test_step_of_prompts_is_limited_while_decodes_are_in_flight() -> None:
    """They wait for it as for a step of their own."""
    rig = Rig(stages=2, pages=2000, max_seq_len=2048, target_step_s=0.1)
    decodes = decoding(rig, 2)
    for _ in range(20):
        rig.scheduler._step_time._prompt_token.add(0.001)
    prompt = rig.submit(1500, 2)
    for number, decode in enumerate(decodes):
        assert shape(launched(rig)) == [(decode, 3, 1), (prompt, 48 * number, 48)], "0.1 s / 2 is for 50"
    assert shape(launched(rig)) == [(prompt, 96, 48)]
    for sequence in decodes:
        rig.scheduler.abort(sequence.key)
    assert shape(launched(rig)) == [(prompt, 144, 512)]
