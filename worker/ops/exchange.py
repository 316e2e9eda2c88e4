"""Exchanges rows between the processes that compute a model together, through shared memory or TCP (csrc/ranks.c)."""

import ctypes
import errno
import mmap
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from ctypes import POINTER, Structure, c_char, c_int, c_long, c_uint64, c_void_p

import torch
from torch import Tensor

from worker.ops.native import library

MOST_RANKS, LINE = 8, 64  # as in csrc/ranks.h
HEADER_BYTES = (MOST_RANKS + 1) * LINE


class RankLost(Exception):
    """One of the processes that compute a model together has died, so the other processes cannot go on."""


class RanksStruct(Structure):
    _fields_ = [
        ("header", c_void_p), ("buffers", c_void_p * 2), ("capacity", c_long), ("rank", c_long), ("count", c_long),
        ("rounds", c_uint64), ("sockets", POINTER(c_int)), ("lost", c_long), ("error", c_long),
    ]  # fmt: skip


def shared_bytes(capacity: int) -> int:
    """Returns how many bytes the exchange needs. capacity: the bytes that all ranks together exchange in a round"""
    return HEADER_BYTES + 2 * capacity


class RanksC:
    """One rank's end of the exchange. All ranks make the same calls in the same order."""

    def __init__(
        self, memory: mmap.mmap, rank: int, count: int, links: Mapping[int, socket.socket] | None = None
    ) -> None:
        """memory: `shared_bytes` bytes, zero at first, which all ranks map; the bytes stay mapped while this object
        exists
        links: if some ranks are on other hosts, TCP connections to all other ranks; then only this rank maps `memory`
        """
        loaded = library()
        assert loaded is not None and 0 <= rank < count <= MOST_RANKS
        self._library, self._memory, self.rank, self.count = loaded, memory, rank, count
        address = ctypes.addressof(c_char.from_buffer(memory))
        capacity = (len(memory) - HEADER_BYTES) // 2
        begin = address + HEADER_BYTES
        self._links = links or {}
        numbers = [self._links[other].fileno() if other != rank else -1 for other in range(count)] if links else None
        self.struct = RanksStruct(
            address, (c_void_p * 2)(begin, begin + capacity), capacity, rank, count, 0,
            None if numbers is None else (c_int * count)(*numbers), rank,
        )  # fmt: skip

    def gather(self, own: Tensor) -> Tensor:
        """Returns the columns of all ranks, [T, count * N], in the order of the ranks. own: this rank's columns [T, N]

        Raises RankLost if another rank has died.
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
            raise RankLost(self._why())

    def _why(self) -> str:
        rank, error = self.struct.lost, self.struct.error
        if rank == self.rank or rank not in self._links:
            return "a process that computes a part of the model has died"
        if error == errno.EPROTO:
            return f"rank {rank} has sent rows of another step"
        return f"the connection to rank {rank} has broken: {os.strerror(error) if error else 'it has closed'}"

    @property
    def lost(self) -> bool:
        return self._memory[MOST_RANKS * LINE] != 0

    def end(self) -> None:
        """Ends the exchange: from now on, no rank waits for another one. Any thread of any process may call this."""
        self._memory[MOST_RANKS * LINE] = 1
        for link in self._links.values():
            with suppress(OSError):  # the link is closed already
                link.shutdown(socket.SHUT_RDWR)
