"""Computes how many slots for recurrent states to make, in plain integers. A slot holds the states of all layers."""


def slots_per_sequence(*, overlap: bool) -> int:
    """Returns how many slots each sequence has: one to read, and one to write for each step in flight."""
    return 3 if overlap else 2


def usable_slots(affordable: int, sequences: int, checkpoints: int, *, overlap: bool) -> int:
    """Returns how many slots to make, not counting the scratch slot.

    affordable: how many slots fit in the memory; sequences: how many sequences may run; checkpoints: how many states
    the prefix cache can use. The result is always enough for one sequence that begins with a cached state.
    """
    own = slots_per_sequence(overlap=overlap)
    return max(own + 1, min(affordable, own * sequences + max(1, checkpoints)))
