"""Exchanges rows between the processes that compute a model together: memory that all map, and csrc/ranks/."""

import ctypes
import mmap
from ctypes import Structure, c_char, c_long, c_uint64, c_void_p

import torch
from torch import Tensor

from worker.kernels.cpu.library import library

MOST_RANKS, LINE = 8, 64  # as in csrc/ranks/ranks.h
HEADER_BYTES = (MOST_RANKS + 1) * LINE


class RankLost(Exception):
    """A process of a model that several compute has died. The others cannot go on."""


class RanksStruct(Structure):
    _fields_ = [
        ("header", c_void_p), ("buffers", c_void_p * 2), ("capacity", c_long), ("rank", c_long), ("count", c_long),
        ("rounds", c_uint64),
    ]  # fmt: skip


def shared_bytes(capacity: int) -> int:
    """Returns how much memory ranks share. capacity: bytes that all of them exchange in a round."""
    return HEADER_BYTES + 2 * capacity


class RanksC:
    """The exchange as one rank sees it. All ranks make the same calls in the same order."""

    def __init__(self, memory: mmap.mmap, rank: int, count: int) -> None:
        """memory: of `shared_bytes`, mapped by all ranks, zero at first. It stays mapped as long as this exists."""
        loaded = library()
        assert loaded is not None and 0 <= rank < count <= MOST_RANKS
        self._library, self._memory, self.rank, self.count = loaded, memory, rank, count
        address = ctypes.addressof(c_char.from_buffer(memory))
        capacity = (len(memory) - HEADER_BYTES) // 2
        begin = address + HEADER_BYTES
        self.struct = RanksStruct(address, (c_void_p * 2)(begin, begin + capacity), capacity, rank, count, 0)

    def gather(self, own: Tensor) -> Tensor:
        """Returns the columns of all ranks [T, count * N] in the order of the ranks; each gives `own` [T, N].

        Raises RankLost.
        """
        own = own.contiguous()
        rows, columns = own.shape
        whole = torch.empty(rows, self.count * columns, dtype=own.dtype)
        sizes = (c_long(rows), c_long(columns * own.element_size()), torch.get_num_threads())
        self.check(self._library.ranks_gather(
            ctypes.byref(self.struct), c_void_p(own.data_ptr()), c_void_p(whole.data_ptr()), *sizes
        ))  # fmt: skip
        return whole

    def check(self, failed: int) -> None:
        if failed and self.lost:
            raise RankLost("a process that computes a part of the model has died")

    @property
    def lost(self) -> bool:
        return self._memory[MOST_RANKS * LINE] != 0

    def end(self) -> None:
        """Makes all ranks stop to wait for each other, now and later. Any process may call it."""
        self._memory[MOST_RANKS * LINE] = 1
