"""Attention's list of work items equals a list that is counted item by item."""

from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from worker.ops.attention.triton_shared import (
    FEW,
    MANY,
    find_item,
    list_split_rows,
    list_splits,
    list_tiles,
    sequence_block,
)

ROWS, SIZE, SHORT = 3, 16, 4
Q_LENS = [1, 0, 7, 2, 40, 1, 0, 3]
SEQ_LENS = [16 * 40, 0, 7, 100, 300, 1, 1, 16 * 17]


@triton.jit
def _items_kernel(
    starts_ptr, lens_ptr, rows_ptr, tiles_ptr, splits_ptr, index_ptr, sequences, max_rows, window,
    ROWS: tl.constexpr, SIZE: tl.constexpr, SHORT: tl.constexpr, UNIFORM: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    sequence, _ = find_item(list_split_rows(starts_ptr, sequences, max_rows, BLOCK_S), item)
    tl.store(rows_ptr + item, sequence)
    sequence, _ = find_item(list_tiles(starts_ptr, sequences, max_rows, ROWS, BLOCK_S), item)
    tl.store(tiles_ptr + item, sequence)
    ends = list_splits(
        starts_ptr, lens_ptr, sequences, max_rows, window, ROWS, SIZE, SHORT, UNIFORM, BLOCK_S
    )  # fmt: skip
    entry, index = find_item(ends, item)
    tl.store(splits_ptr + item, tl.where(item < tl.max(ends, axis=0), entry, -1))
    tl.store(index_ptr + item, index)


def begins() -> list[int]:
    """Returns the first position of each split: 4 splits have 16 positions, 3 have 64, all others 256."""
    return [*range(0, 64, 16), *range(64, 256, 64), *range(256, 16 * 41, 256)]


@pytest.mark.parametrize(("window", "max_rows"), [(0, 4), (0, 1), (50, 7), (50, 100)])
def test_lists_have_each_row_tile_and_split_once_and_the_longest_splits_first(window: int, max_rows: int) -> None:
    starts = torch.tensor([0, *Q_LENS]).cumsum(0).int()
    lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
    rows, tiles, splits, index = (torch.full((200,), -1, dtype=torch.int32) for _ in range(4))
    _items_kernel[(200,)](
        starts, lens, rows, tiles, splits, index, len(lens), max_rows, window or 1 << 30,
        ROWS, SIZE, SHORT, window > 0, FEW,
    )  # fmt: skip
    split = [s for s, q in enumerate(Q_LENS) if 0 < q <= max_rows]
    expected = [s for s in split for _ in range(Q_LENS[s])]
    assert rows[: len(expected)].tolist() == expected and rows[len(expected)] == FEW  # rows of no sequence
    expected = [s for s, q in enumerate(Q_LENS) if q > max_rows for _ in range(-(-q // ROWS))]
    assert tiles[: len(expected)].tolist() == expected and tiles[len(expected)] == FEW

    cuts = [*range(0, 16 * 41, 16)] if window else begins()
    seen = {
        s: [
            number for number, (begin, end) in enumerate(zip(cuts, [*cuts[1:], 1 << 30], strict=True))
            if begin < SEQ_LENS[s] and end > SEQ_LENS[s] - Q_LENS[s] + 1 - (window or 1 << 30)
        ]
        for s in split
    }  # fmt: skip
    kinds = [range(1 << 30)] if window else [range(7, 1 << 30), range(4, 7), range(4)]
    expected = [
        (kind * FEW + s, number)
        for kind, s in product(range(len(kinds)), split)
        for number in range(sum(one in kinds[kind] for one in seen[s]) * -(-Q_LENS[s] // ROWS))
    ]
    got = list(zip(splits.tolist(), index.tolist(), strict=True))
    assert got[: len(expected)] == expected and set(splits.tolist()[len(expected) :]) == {-1}


def test_sequence_block_has_few_values() -> None:
    blocks = {sequence_block(sequences) for sequences in range(1, 1025)}
    assert blocks == {FEW, MANY, 512, 1024}
    assert all(sequence_block(sequences) >= sequences for sequences in range(1, 1025))
