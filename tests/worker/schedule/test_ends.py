"""How sequences end, are refused, aborted and timed out."""

from typing import Any

import pytest

from shared.messages import Outcome, Refusal
from tests.worker.schedule.harness import EOS, Rig, commit
from worker.schedule.admission import QueueFull, Refused, TooLong
from worker.schedule.scheduler import Scheduler
from worker.schedule.sequence import Sequence

STOP = 7
OTHER = 5


def feed(rig: Rig, sequence: Sequence, ids: list[int]) -> Outcome | None:
    """Commits steps in which the model would say `ids`; the outcome, None if there is none yet."""
    outcome = None
    for token in ids:
        assert outcome is None, "it has ended already"
        (advance,) = commit(rig.scheduler, rig.scheduler.plan(rig.now), [token], rig.now)
        rig.scheduler.check()
        assert advance.sequence is sequence and advance.tokens == [token]
        outcome = advance.outcome
    return outcome


@pytest.mark.parametrize(
    ("ids", "sampling", "outcome"),
    [
        ([OTHER, EOS], {}, Outcome.EOS),
        ([OTHER, STOP], {"stop_token_ids": (STOP,)}, Outcome.STOP),
        ([OTHER, OTHER, OTHER], {"max_tokens": 3}, Outcome.LENGTH),
        ([OTHER, OTHER], {"max_tokens": 3}, None),
        ([EOS], {"stop_token_ids": (EOS,)}, Outcome.EOS),
        ([OTHER, EOS], {"max_tokens": 2}, Outcome.EOS),
        ([OTHER, STOP], {"max_tokens": 2, "stop_token_ids": (STOP,)}, Outcome.STOP),
        ([EOS, EOS, OTHER], {"ignore_eos": True, "max_tokens": 3}, Outcome.LENGTH),
        ([EOS], {"ignore_eos": True, "stop_token_ids": (EOS,)}, Outcome.STOP),
        ([EOS, STOP, EOS], {"min_tokens": 3, "stop_token_ids": (STOP,)}, Outcome.EOS),
        ([EOS, STOP], {"min_tokens": 3, "stop_token_ids": (STOP,)}, None),
        ([EOS, EOS], {"min_tokens": 5, "max_tokens": 2}, Outcome.LENGTH),
    ],
)
def test_the_outcome_of(ids: list[int], sampling: dict[str, Any], outcome: Outcome | None) -> None:
    rig = Rig(eos_token_ids=frozenset({EOS}))
    sequence = rig.submit(3, **sampling)
    assert feed(rig, sequence, ids) == outcome
    assert rig.scheduler.has_work == (outcome is None)
    assert bool(rig.pool.counts().owned) == (outcome is None), "pages are free when it has ended"


def test_it_ends_at_max_seq_len() -> None:
    rig = Rig(max_seq_len=6)
    assert feed(rig, rig.submit(4, max_tokens=2), [OTHER, OTHER]) == Outcome.LENGTH


@pytest.mark.parametrize("prompt", [1, 5, 9])
def test_max_tokens_0_computes_the_prompt_and_samples_nothing(prompt: int) -> None:
    rig = Rig(prefill_chunk_size=4)
    sequence = rig.submit(prompt, max_tokens=0)
    advances = []
    while rig.scheduler.has_work:
        plan = rig.plan()
        assert not plan.sampling
        advances += rig.commit(plan, [])
    ((only),) = advances
    assert (only.sequence, only.tokens, only.outcome) == (sequence, [], Outcome.LENGTH)
    assert sequence.computed_tokens == prompt and sequence.first_token == 0.0


def test_a_stream_that_goes_on_computes_over_its_output_and_samples_what_comes_next() -> None:
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
def test_a_stream_that_was_complete_ends_without_another_token(generated: tuple[int, ...], outcome: Outcome) -> None:
    rig = Rig(eos_token_ids=frozenset({EOS}))
    rig.submit(3, max_tokens=2, generated=generated, stop_token_ids=(STOP,))
    plan = rig.plan()
    assert plan and not plan.sampling
    (advance,) = commit(rig.scheduler, plan, [], 0.0)
    assert (advance.tokens, advance.outcome) == ([], outcome)


def test_abort_frees_pages_at_once_and_is_idempotent() -> None:
    rig = Rig(max_batch_size=1)
    runs, waits = rig.submit(9), rig.submit(9)
    rig.plan()
    assert rig.scheduler.abort(waits.key) is waits and rig.scheduler.status.waiting_tokens == 0
    assert rig.scheduler.abort(runs.key) is runs and rig.pool.counts().owned == 0
    assert rig.scheduler.abort(runs.key) is None
    assert rig.scheduler.abort((b"nobody", 1)) is None
    rig.scheduler.check()
    assert not rig.scheduler.has_work


def test_failing_what_has_left_does_nothing() -> None:
    rig = Rig()
    gone = rig.submit(3)
    rig.scheduler.abort(gone.key)
    again = rig.sequence(3)
    again.key = gone.key
    rig.scheduler.submit(again, 0.0)
    rig.scheduler.fail(gone)
    assert rig.scheduler.get(again.key) is again


def test_deadlines_end_waiting_and_running_sequences() -> None:
    rig = Rig(max_batch_size=1)
    runs, waits, free = rig.submit(3, deadline=2.0), rig.submit(3, deadline=1.0), rig.submit(3)
    rig.step()
    assert rig.scheduler.expire(0.9) == []
    assert rig.scheduler.expire(1.0) == [waits]
    assert rig.scheduler.expire(5.0) == [runs]
    assert rig.scheduler.expire(9.0) == [] and rig.scheduler.sequences() == [free]
    rig.scheduler.check()


def test_the_next_wakeup_is_the_first_deadline_of_a_batch_that_still_forms() -> None:
    rig = Rig(batching_mode="static", batch_wait_timeout_s=3.0)
    assert rig.scheduler.next_wakeup(0.0) == float("inf")
    rig.submit(3, deadline=2.0)
    assert not rig.plan() and rig.scheduler.next_wakeup(0.0) == 2.0
    rig.scheduler.expire(2.0)
    assert rig.scheduler.next_wakeup(2.0) == float("inf")


def refusal(scheduler: Scheduler, sequence: Sequence) -> Refusal:
    before = scheduler.sequences()
    with pytest.raises(Refused) as refused:
        scheduler.submit(sequence, 0.0)
    scheduler.check()
    assert scheduler.sequences() == before
    return refused.value.reason


def test_a_full_queue_refuses() -> None:
    rig = Rig(max_waiting_requests=2)
    rig.submit(3), rig.submit(3)
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        rig.submit(3)
    rig.plan()
    rig.submit(3)


def test_running_ones_do_not_count_as_waiting() -> None:
    rig = Rig(max_waiting_requests=4, max_batch_size=2)
    taken = 0
    for _ in range(8):
        rig.plan()
        try:
            rig.submit(3)
            taken += 1
        except QueueFull:
            pass
    assert taken == 6


def test_a_queue_of_none_takes_whoever_can_start_at_once() -> None:
    rig = Rig(max_waiting_requests=0, max_batch_size=1)
    rig.submit(3)
    assert refusal(rig.scheduler, rig.sequence(3)) == Refusal.QUEUE_FULL
    rig.plan()
    assert refusal(rig.scheduler, rig.sequence(3)) == Refusal.QUEUE_FULL


def test_waiting_tokens_are_limited_but_a_long_prompt_may_wait_alone() -> None:
    rig = Rig(max_waiting_tokens=10)
    rig.submit(20)
    rig.plan()
    rig.submit(6)
    assert refusal(rig.scheduler, rig.sequence(5)) == Refusal.QUEUE_FULL
    rig.submit(4)


def test_what_can_never_finish_is_refused() -> None:
    rig = Rig(max_seq_len=40, pages=8, page_size=4)
    assert refusal(rig.scheduler, rig.sequence(30, max_tokens=11)) == Refusal.TOO_LONG
    assert refusal(rig.scheduler, rig.sequence(10, max_tokens=20)) == Refusal.TOO_LONG, "30 tokens, 28 fit"
    with pytest.raises(TooLong, match="pool"):
        rig.submit(29, max_tokens=0)
    rig.submit(10, max_tokens=19)  # the last token's K/V is never written
    rig.finish(30)
    assert len(rig.ends) == 1


def test_empty_prompts_and_ids_in_use_are_invalid() -> None:
    rig = Rig()
    assert refusal(rig.scheduler, rig.sequence([])) == Refusal.INVALID
    taken, again = rig.submit(3), rig.sequence(3)
    again.key = taken.key
    assert refusal(rig.scheduler, again) == Refusal.INVALID
