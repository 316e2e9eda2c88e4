"""Cuts the keys of a sequence into splits, which attention computes separately.

The positions of the cuts do not depend on the batch.

With UNIFORM (sliding windows, which see few keys), all splits have SPLIT_SIZE positions. Otherwise, the first
SHORT_SPLITS splits have SPLIT_SIZE positions, the next 3/4 SHORT_SPLITS splits are four times as long, and all later
splits are 16 times as long. Long sequences keep a GPU busy even with fewer splits, and each split costs memory for a
partial result. SPLIT_SIZE is a power of two, SHORT_SPLITS a multiple of four.
"""

import triton
import triton.language as tl


@triton.jit
def split_index(position, SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr):
    """Returns the index of the split that contains a position."""
    index = position // SPLIT_SIZE
    if not UNIFORM:
        later = tl.where(
            index < 4 * SHORT_SPLITS, index // 4 + SHORT_SPLITS * 3 // 4, index // 16 + SHORT_SPLITS * 3 // 2
        )
        index = tl.where(index < SHORT_SPLITS, index, later)
    return index


@triton.jit
def split_start(index, SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr):
    """Returns the first position of a split."""
    start = index
    if not UNIFORM:
        later = tl.where(
            index < SHORT_SPLITS * 7 // 4, 4 * (index - SHORT_SPLITS * 3 // 4), 16 * (index - SHORT_SPLITS * 3 // 2)
        )
        start = tl.where(index < SHORT_SPLITS, index, later)
    return start * SPLIT_SIZE


@triton.jit
def kind_start(kind, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr):
    """Returns the index of the first split of a kind. For kind -1, it is larger than any index.

    The splits of kind 2 come first, then the longer splits of kind 1, and last the longest splits, of kind 0. With
    UNIFORM, there is only kind 0. The splits of kind k end where kind k - 1 starts. A kind without splits starts at 0.
    """
    start = tl.where(kind < 0, 1 << 30, 0)
    if not UNIFORM:
        start = tl.where(kind == 0, SHORT_SPLITS * 7 // 4, tl.where(kind == 1, SHORT_SPLITS, start))
    return start


@triton.jit
def begins_split(position, SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr):
    """Returns whether a split begins at `position`."""
    size = SPLIT_SIZE
    if not UNIFORM:
        size = tl.where(
            position < SHORT_SPLITS * SPLIT_SIZE,
            SPLIT_SIZE,
            tl.where(position < 4 * SHORT_SPLITS * SPLIT_SIZE, 4 * SPLIT_SIZE, 16 * SPLIT_SIZE),
        )
    return position % size == 0


def count_splits(max_kv_len: int, window: int, split_size: int, short_splits: int) -> int:
    """Returns the most splits that a row with up to `max_kv_len` keys can see. window: 0 means no window"""
    index = (max_kv_len - 1) // split_size
    if window:
        return min(index, triton.cdiv(window, split_size)) + 1
    later = index // 4 + short_splits * 3 // 4 if index < 4 * short_splits else index // 16 + short_splits * 3 // 2
    return (index if index < short_splits else later) + 1
