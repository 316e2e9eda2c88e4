"""Attention splits keys at positions that do not depend on the batch."""

from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl

from worker.ops.attention.triton_shared import begins_split, count_splits, split_index, split_start

SIZE, SHORT, LENGTH = 16, 4, 16 * 4 * 40


@triton.jit
def _splits_kernel(index_ptr, start_ptr, begins_ptr, SIZE: tl.constexpr, SHORT: tl.constexpr, UNIFORM: tl.constexpr):
    position = tl.program_id(0)
    index = split_index(position, SIZE, SHORT, UNIFORM)
    tl.store(index_ptr + position, index)
    tl.store(start_ptr + position, split_start(index, SIZE, SHORT, UNIFORM))
    tl.store(begins_ptr + position, begins_split(position, SIZE, SHORT, UNIFORM).to(tl.int32))


@pytest.mark.parametrize("uniform", [False, True])
def test_splits_are_contiguous_and_begin_where_they_say(uniform: bool) -> None:
    index, start, begins = (torch.full((LENGTH,), -1, dtype=torch.int32) for _ in range(3))
    _splits_kernel[(LENGTH,)](index, start, begins, SIZE, SHORT, uniform)
    steps = index[1:] - index[:-1]
    assert index[0] == 0 and set(steps.tolist()) == {0, 1}
    first = [position for position in range(LENGTH) if position == 0 or index[position] != index[position - 1]]
    assert [position for position in range(LENGTH) if begins[position]] == first
    assert [int(start[position]) for position in first] == first
    sizes = {after - before for before, after in pairwise(first)}
    assert sizes == ({SIZE} if uniform else {SIZE, 4 * SIZE, 16 * SIZE})
    for length in (1, SIZE, SIZE + 1, 5 * SIZE, 16 * SIZE + 3, 40 * SIZE, LENGTH):
        if not uniform:
            assert count_splits(length, 0, SIZE, SHORT) == int(index[length - 1]) + 1


def test_count_splits_of_a_window_is_bounded_by_the_window() -> None:
    assert count_splits(10_000, 64, SIZE, SHORT) == 5
    assert count_splits(10, 64, SIZE, SHORT) == 1
