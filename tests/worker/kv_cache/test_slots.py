"""The number of slots for recurrent states."""

from worker.kv_cache.pages import slots_per_sequence, usable_slots


def test_slots_per_sequence_are_one_to_read_and_one_for_each_step_in_flight() -> None:
    assert (slots_per_sequence(overlap=False), slots_per_sequence(overlap=True)) == (2, 3)


def test_usable_slots_are_those_of_all_sequences_and_checkpoints_or_what_is_affordable() -> None:
    assert usable_slots(1000, sequences=4, checkpoints=10, overlap=False) == 18
    assert usable_slots(1000, sequences=4, checkpoints=10, overlap=True) == 22
    assert usable_slots(7, sequences=4, checkpoints=10, overlap=False) == 7


def test_usable_slots_always_hold_one_sequence_that_begins_with_a_cached_state() -> None:
    assert usable_slots(-1, sequences=4, checkpoints=0, overlap=False) == 3
    assert usable_slots(1000, sequences=1, checkpoints=0, overlap=True) == 4
