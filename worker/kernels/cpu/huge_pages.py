"""Memory in huge pages: reading it causes few TLB misses. A weight in pages of 4 KB is read up to a seventh slower."""

import math
from collections.abc import Callable, Sequence
from ctypes import c_long, c_void_p

import torch
from torch import Tensor

from worker.kernels.cpu.library import library

HUGE_PAGE = 1 << 21  # bytes
PIECE = 1 << 26  # bytes
ALIGNMENT = 64  # bytes; of everything in a piece

Memory = Callable[[Sequence[int], torch.dtype], Tensor]  # returns uninitialized memory of that shape


def fresh_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns uninitialized memory. Large memory is aligned to huge pages, so that they can hold nearly all of it."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < HUGE_PAGE:
        return torch.empty(*shape, dtype=dtype)
    buffer = torch.empty(nbytes + HUGE_PAGE, dtype=torch.uint8)
    start = -buffer.data_ptr() % HUGE_PAGE
    return huge_pages(buffer[start : start + nbytes]).view(dtype).view(*shape)


def huge_pages(fresh: Tensor) -> Tensor:
    """Requests huge pages for `fresh` (contiguous, not written yet) and returns it. Reading the tensor then causes
    no TLB misses."""
    found = library()
    if found is not None:
        found.advise_huge_pages(c_void_p(fresh.data_ptr()), c_long(fresh.nbytes))
    return fresh


class Pieces:
    """Hands out memory of large pieces, so that tensors smaller than a huge page lie in huge pages, too.

    The memory of a piece is freed with the last of its tensors. What was not written of a piece takes no memory.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0  # bytes of the piece

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns uninitialized memory; a piece of its own if it is large."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > PIECE // 4:
            return fresh_memory(shape, dtype)
        if self._used + nbytes > self._piece.nbytes:
            self._piece, self._used = fresh_memory((PIECE,), torch.uint8), 0
        begin, self._used = self._used, self._used + -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._piece[begin : begin + nbytes].view(dtype).view(*shape)
