"""The limit on the number of adapters that run at once."""

from shared.messages import Adapter, Sampling
from worker.kv_cache.pages import PagePool
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import AdapterUse, Sequence, used_by


def sequence(id: int, name: str = "") -> Sequence:
    made = Sequence((b"f", id), [1, 2, 3], 3, Sampling(5), 0)
    made.adapter = AdapterUse(Adapter(name, "/", name)) if name else None
    return made


def test_sequence_joins_if_its_adapter_runs_or_a_place_is_free() -> None:
    running = [sequence(0), sequence(1, "a"), sequence(2, "a"), sequence(3, "b")]
    assert {adapter.name for adapter in used_by(running)} == {"a", "b"}
    for name, most, joins in (("a", 2, True), ("c", 2, False), ("c", 3, True), ("b", 1, False)):
        use = sequence(9, name).adapter
        assert use is not None and use.has_place(running, most) is joins


def test_sequences_with_one_adapter_too_many_wait_in_order_until_another_ends() -> None:
    scheduler = Scheduler(SchedulerConfig(max_seq_len=64, max_loras=2), [PagePool(50, 16)])
    sequences = [sequence(0, "a"), sequence(1, "b"), sequence(2, "c"), sequence(3), sequence(4, "a")]
    for one in sequences:
        scheduler.submit(one, 0.0)
    assert {chunk.sequence.key[1] for chunk in scheduler.plan(0.0).chunks} == {0, 1}
    scheduler.abort((b"f", 1))
    assert {chunk.sequence.key[1] for chunk in scheduler.plan(1.0).chunks} == {0, 2, 3, 4}
    scheduler.check()
