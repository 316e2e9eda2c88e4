"""What a sequence still needs, in plain integers: positions in a sliding window (the pages before them are freed), and
slots of recurrent states.
"""

from typing import Protocol

KEY_BLOCK = 128  # kernels read keys in aligned blocks of at most this many positions, and mask keys outside the window


class StepSizes(Protocol):
    """The settings that limit how many tokens of a sequence a step computes."""

    @property
    def use_chunked_prefill(self) -> bool: ...
    @property
    def prefill_chunk_size(self) -> int: ...
    @property
    def max_step_tokens(self) -> int: ...


def first_kept(window: int, position: int) -> int:
    """Returns the first position that must be kept for rows at `position` and later. window 0: all are kept.

    This position begins a block of keys, although rows attend to only a part of the block. Kernels multiply the
    masked part by zero, and zero times NaN is NaN, so the whole block must be memory of the sequence itself.
    """
    return max(0, position - window + 1) // KEY_BLOCK * KEY_BLOCK if window else 0


def window_pages(window: int, page_size: int) -> int:
    """Returns the maximum number of pages that a sequence needs for its window between two steps.

    This is two more than the positions of the window fill: one because the window may begin and end within a page, and
    one because a page behind the window is returned only after a step.
    """
    return -(-(window + KEY_BLOCK) // page_size) + 2


def chunk_tokens(sizes: StepSizes, longest: int) -> int:
    """Returns the maximum number of tokens of one sequence in a step. longest: the maximum length of a sequence."""
    return min(sizes.prefill_chunk_size, sizes.max_step_tokens) if sizes.use_chunked_prefill else longest


def chunk_pages(chunk: int, page_size: int) -> int:
    """Returns the maximum number of pages that a sequence needs besides window_pages(). chunk: its tokens per step.

    These are the pages of two chunks, because one step may be planned while another one is in flight.
    """
    return -(-2 * chunk // page_size)


# Computes how many slots for recurrent states to make, in plain integers. A slot holds the states of all layers.


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
