"""Memory for weights: aligned to huge pages, and shared by small tensors."""

import torch
from torch import Tensor

from worker.ops.native import ALIGNMENT, HUGE_PAGE, PIECE, Pieces, fresh_memory


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_large_memory_is_aligned_to_huge_pages() -> None:
    assert fresh_memory((HUGE_PAGE + 8,), torch.uint8).data_ptr() % HUGE_PAGE == 0


def test_small_tensors_share_a_piece_and_do_not_overlap() -> None:
    pieces = Pieces()
    tensors = [
        pieces.take(shape, dtype)
        for shape, dtype in (((3, 5), torch.int64), ((7,), torch.uint8), ((2,), torch.float32))
    ]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [tensor.tolist() for tensor in tensors] == [[[0] * 5] * 3, [1] * 7, [2.0] * 2]
    assert len({address(tensor) for tensor in tensors}) == 1
    assert tensors[0].data_ptr() % HUGE_PAGE == 0 and all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


def test_a_tensor_beyond_the_end_of_a_piece_begins_the_next() -> None:
    pieces, part = Pieces(), PIECE // 4
    places = [address(pieces.take((part,), torch.uint8)) for _ in range(5)]
    assert len({*places}) == 2 and len({*places[:4]}) == 1


def test_a_large_tensor_has_memory_of_its_own() -> None:
    pieces = Pieces()
    first, large, second = (pieces.take((n,), torch.uint8) for n in (64, PIECE, 64))
    assert address(first) == address(second) != address(large) and large.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() == first.data_ptr() + 64
