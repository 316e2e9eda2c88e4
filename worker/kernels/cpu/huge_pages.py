"""Allocates memory in huge pages, so that reading it causes few TLB misses. In pages of 4 KB, a weight is read up to a
seventh slower.
"""

import math
from collections.abc import Callable, Sequence
from ctypes import c_long, c_void_p

import torch
from torch import Tensor

from worker.kernels.cpu.library import library

HUGE_PAGE = 1 << 21  # bytes
PIECE = 1 << 26  # bytes
ALIGNMENT = 64  # every tensor in a piece begins at a multiple of this many bytes

Memory = Callable[[Sequence[int], torch.dtype], Tensor]  # returns uninitialized memory of the given shape and dtype


def fresh_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns uninitialized memory. Large memory is aligned to huge pages, so that nearly all of it can be in them."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < HUGE_PAGE:
        return torch.empty(*shape, dtype=dtype)
    buffer = torch.empty(nbytes + HUGE_PAGE, dtype=torch.uint8)
    start = -buffer.data_ptr() % HUGE_PAGE
    return huge_pages(buffer[start : start + nbytes]).view(dtype).view(*shape)


def huge_pages(fresh: Tensor) -> Tensor:
    """Requests huge pages for `fresh` (contiguous, not written yet) and returns `fresh`. Reading this memory then
    causes few TLB misses.
    """
    found = library()
    if found is not None:
        found.advise_huge_pages(c_void_p(fresh.data_ptr()), c_long(fresh.nbytes))
    return fresh


class Pieces:
    """Allocates tensors inside large pieces of memory, so that tensors smaller than a huge page are in huge pages, too.

    A piece is freed with the last of its tensors. Parts of a piece that were never written take no physical memory.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0  # how many bytes of the piece are in use

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns uninitialized memory. A large tensor gets a piece of its own."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > PIECE // 4:
            return fresh_memory(shape, dtype)
        if self._used + nbytes > self._piece.nbytes:
            self._piece, self._used = fresh_memory((PIECE,), torch.uint8), 0
        begin, self._used = self._used, self._used + -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._piece[begin : begin + nbytes].view(dtype).view(*shape)
