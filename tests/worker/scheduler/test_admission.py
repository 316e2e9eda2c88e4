"""Admission: full queues, places reserved for other tenants, and sequences that could never finish."""

import pytest

from shared.messages import Refusal
from tests.worker.scheduler.harness import Rig
from worker.scheduler.queue import QueueFull, Refused, TooLong
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Sequence


def refusal(scheduler: Scheduler, sequence: Sequence) -> Refusal:
    before = scheduler.sequences()
    with pytest.raises(Refused) as refused:
        scheduler.submit(sequence, 0.0)
    scheduler.check()
    assert scheduler.sequences() == before
    return refused.value.reason


def test_submit_to_a_full_queue_raises() -> None:
    rig = Rig(max_waiting_requests=2)
    rig.submit(3), rig.submit(3)
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        rig.submit(3)
    rig.plan()
    rig.submit(3)


def test_submit_running_sequences_do_not_count_as_waiting() -> None:
    rig = Rig(max_waiting_requests=4, max_batch_size=2)
    accepted = 0
    for _ in range(8):
        rig.plan()
        try:
            rig.submit(3)
            accepted += 1
        except QueueFull:
            pass
    assert accepted == 6


def test_submit_to_a_queue_of_zero_accepts_only_immediate_starts() -> None:
    rig = Rig(max_waiting_requests=0, max_batch_size=1)
    rig.submit(3)
    assert refusal(rig.scheduler, rig.sequence(3)) == Refusal.QUEUE_FULL
    rig.plan()
    assert refusal(rig.scheduler, rig.sequence(3)) == Refusal.QUEUE_FULL


def test_submit_waiting_tokens_are_limited_but_a_long_prompt_may_wait_alone() -> None:
    rig = Rig(max_waiting_tokens=10)
    rig.submit(20)
    rig.plan()
    rig.submit(6)
    assert refusal(rig.scheduler, rig.sequence(5)) == Refusal.QUEUE_FULL
    rig.submit(4)


def test_submit_of_an_impossible_sequence_raises_too_long() -> None:
    rig = Rig(max_seq_len=40, pages=8, page_size=4)
    assert refusal(rig.scheduler, rig.sequence(30, max_tokens=11)) == Refusal.TOO_LONG
    assert refusal(rig.scheduler, rig.sequence(10, max_tokens=20)) == Refusal.TOO_LONG, "30 tokens, 28 fit"
    with pytest.raises(TooLong, match="pool"):
        rig.submit(29, max_tokens=0)
    rig.submit(10, max_tokens=19)  # the last token's K/V is never written
    rig.finish(30)
    assert len(rig.ends) == 1


def test_submit_of_an_empty_prompt_or_a_live_id_is_invalid() -> None:
    rig = Rig()
    assert refusal(rig.scheduler, rig.sequence([])) == Refusal.INVALID
    accepted, again = rig.submit(3), rig.sequence(3)
    again.key = accepted.key
    assert refusal(rig.scheduler, again) == Refusal.INVALID


def fill(rig: Rig, tenant: str, prompt: int = 2) -> int:
    """Submits requests of a tenant until a request is refused. Returns the number of accepted requests."""
    for count in range(1000):
        try:
            rig.submit(prompt, tenant=tenant)
        except QueueFull as refused:
            assert (
                tenant in str(refused) or not tenant or rig.scheduler.status.waiting >= rig.config.max_waiting_requests
            )
            return count
    raise AssertionError


def test_submit_of_one_tenant_leaves_places_for_the_next() -> None:
    rig = Rig(max_batch_size=1, max_waiting_requests=64)
    rig.submit(2, max_tokens=9, tenant="a")
    rig.step()
    assert fill(rig, "a") == 56
    accepted = [fill(rig, name) for name in "bcdefgh"]
    assert accepted[:3] == [7, 1, 0] or all(accepted[:2]), accepted
    assert rig.scheduler.status.waiting <= 64


def test_submit_without_tenants_may_fill_the_whole_queue() -> None:
    rig = Rig(max_batch_size=1, max_waiting_requests=16)
    rig.submit(2, max_tokens=9)
    rig.step()
    assert fill(rig, "") == 16


def test_submit_waiting_tokens_are_reserved_for_other_tenants() -> None:
    rig = Rig(max_batch_size=1, max_waiting_requests=1000, max_waiting_tokens=160)
    rig.submit(2, max_tokens=9, tenant="a")
    rig.step()
    assert fill(rig, "a", prompt=4) == 35
    assert fill(rig, "b", prompt=4) >= 1
