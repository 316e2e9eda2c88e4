"""Sizes that follow from a spec."""

import pytest

from worker.model.spec import StoredQuantization


@pytest.mark.parametrize(
    ("block", "grid", "by_row", "words"),
    [
        ((0, 0), (1, 1), True, "one scale for a tensor"),
        ((1, 0), (200, 1), True, "one scale for a row"),
        ((1, 64), (200, 5), False, "one scale for 1 x 64 values"),
        ((128, 128), (2, 3), False, "one scale for 128 x 128 values"),
    ],
)
def test_stored_quantization_has_a_scale_for_each_block(
    block: tuple[int, int], grid: tuple[int, int], by_row: bool, words: str
) -> None:
    stored = StoredQuantization("int8", block)
    assert stored.grid((200, 300)) == grid and stored.by_row is by_row
    assert str(stored) == f"int8, {words}"
