"""Lists the work of attention's programs on the device, because the host knows only upper bounds of lengths.

A fixed number of programs walks a list of work items that is stored nowhere. Each program computes from the lengths how
many items every sequence has, and adds these numbers up: `ends` has the sum up to each sequence. Item i belongs to the
first entry of `ends` that is greater than i. A sequence without rows (padding) has no items, so a bound far above the
real lengths causes no items either.

If a sequence has up to `max_rows` rows, its keys are split: an item is one split of its keys for one tile of its rows.
If a sequence has more rows, an item is one tile of its rows with all their keys.
"""

import triton
import triton.language as tl

from worker.kernels.gpu.attention.key_splits import kind_start, split_index

# a kernel is compiled for up to FEW sequences, for up to MANY, and for up to each greater power of two
FEW, MANY = 32, 256


def sequence_block(sequences: int) -> int:
    """Returns for how many sequences, including padding, a program lists items."""
    return FEW if sequences <= FEW else max(MANY, triton.next_power_of_2(sequences))


@triton.jit
def find_item(ends, item):
    """Returns the entry of an item, and the item's index within the entry."""
    before = ends <= item
    return tl.sum(before.to(tl.int32), axis=0), item - tl.max(tl.where(before, ends, 0), axis=0)


@triton.jit
def count_rows(query_start_loc_ptr, sequences, sequence):
    """Returns how many rows each sequence has; 0 if the index `sequence` is not below `sequences`."""
    exists = sequence < sequences
    begin = tl.load(query_start_loc_ptr + sequence, mask=exists, other=0)
    return tl.load(query_start_loc_ptr + sequence + 1, mask=exists, other=0) - begin


@triton.jit
def list_tiles(query_start_loc_ptr, sequences, max_rows, ROWS: tl.constexpr, BLOCK_S: tl.constexpr):
    """Returns the ends [BLOCK_S] of a list of tiles: tiles of ROWS rows, of all sequences with over max_rows rows."""
    q_len = count_rows(query_start_loc_ptr, sequences, tl.arange(0, BLOCK_S))
    return tl.cumsum(tl.where(q_len > max_rows, tl.cdiv(q_len, ROWS), 0), axis=0)


@triton.jit
def list_split_rows(query_start_loc_ptr, sequences, max_rows, BLOCK_S: tl.constexpr):
    """Returns the ends [BLOCK_S] of a list of rows: all rows of sequences with at most max_rows rows."""
    q_len = count_rows(query_start_loc_ptr, sequences, tl.arange(0, BLOCK_S))
    return tl.cumsum(tl.where(q_len <= max_rows, q_len, 0), axis=0)


@triton.jit
def list_splits(
    query_start_loc_ptr, seq_lens_ptr, sequences, max_rows, window,
    ROWS: tl.constexpr, SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Returns the ends [KINDS * BLOCK_S] of a list of splits: for each tile of ROWS rows of a sequence with at most
    max_rows rows, the splits of the sequence's keys.

    Entry k * BLOCK_S + s has the splits of kind k of sequence s; kind 0 has the longest splits. So the longest splits
    of all sequences are first in the list, and if a program gets one item less than others, it misses only a short
    split.
    """
    # three kinds, and an empty one, because KINDS * BLOCK_S must be a power of two
    KINDS: tl.constexpr = 1 if UNIFORM else 4
    entry = tl.arange(0, KINDS * BLOCK_S)
    sequence = entry % BLOCK_S
    q_len = count_rows(query_start_loc_ptr, sequences, sequence)
    seq_len = tl.load(seq_lens_ptr + sequence, mask=sequence < sequences, other=0)
    first = split_index(tl.maximum(seq_len - q_len + 1 - window, 0), SPLIT_SIZE, SHORT_SPLITS, UNIFORM)
    last = split_index(tl.maximum(seq_len - 1, 0), SPLIT_SIZE, SHORT_SPLITS, UNIFORM)
    begin = tl.maximum(first, kind_start(entry // BLOCK_S, SHORT_SPLITS, UNIFORM))
    end = tl.minimum(last + 1, kind_start(entry // BLOCK_S - 1, SHORT_SPLITS, UNIFORM))
    splits = tl.where(q_len <= max_rows, tl.maximum(end - begin, 0), 0)
    return tl.cumsum(splits * tl.cdiv(q_len, ROWS), axis=0)
