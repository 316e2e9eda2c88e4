"""Where attention cuts a sequence's keys into splits that can be attended apart: at positions of no batch's choosing.

Splits are `split` positions long, all of them where EVEN (windows see few). Otherwise only the first `near` are; then
come 3/4 `near` four times as long, and then ones of 16 times: long sequences need no finer cut to fill a GPU, and each
split leaves a partial sum in memory. split is a power of two, near a multiple of four.
"""

import triton
import triton.language as tl


@triton.jit
def split_index(position, SPLIT: tl.constexpr, NEAR: tl.constexpr, EVEN: tl.constexpr):
    """Which split a position lies in."""
    index = position // SPLIT
    if not EVEN:
        far = tl.where(index < 4 * NEAR, index // 4 + NEAR * 3 // 4, index // 16 + NEAR * 3 // 2)
        index = tl.where(index < NEAR, index, far)
    return index


@triton.jit
def split_start(index, SPLIT: tl.constexpr, NEAR: tl.constexpr, EVEN: tl.constexpr):
    """The first position of a split."""
    start = index
    if not EVEN:
        far = tl.where(index < NEAR * 7 // 4, 4 * (index - NEAR * 3 // 4), 16 * (index - NEAR * 3 // 2))
        start = tl.where(index < NEAR, index, far)
    return start * SPLIT


@triton.jit
def begins_split(position, SPLIT: tl.constexpr, NEAR: tl.constexpr, EVEN: tl.constexpr):
    """Whether a split begins there."""
    size = SPLIT
    if not EVEN:
        size = tl.where(position < NEAR * SPLIT, SPLIT, tl.where(position < 4 * NEAR * SPLIT, 4 * SPLIT, 16 * SPLIT))
    return position % size == 0


def count_splits(max_kv_len: int, window: int, split: int, near: int) -> int:
    """The most splits that a row with up to `max_kv_len` keys looks into; window 0: none."""
    index = (max_kv_len - 1) // split
    if window:
        return min(index, triton.cdiv(window, split)) + 1
    far = index // 4 + near * 3 // 4 if index < 4 * near else index // 16 + near * 3 // 2
    return (index if index < near else far) + 1
