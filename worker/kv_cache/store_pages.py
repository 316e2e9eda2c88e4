"""Copies pages and recurrent states between the K/V cache and the bytes of a file of the store.

Says what a file must have in common with this worker (`space`): a fingerprint of everything that decides the bits, and
how the bits lie in memory.
"""

import json
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from worker.kv_cache.tensors import KVCache
from worker.ops.paged_kv import k_is_transposed, v_is_paired

BLOCK_TOKENS = 256  # a file of the store has the pages of so many tokens; a prefix is found in such steps
KEPT_BYTES = 64 << 20  # memory for copies of pages that is kept to be used again


class HostBytes:
    """The bytes of pages on their way to the host: uint8 [bytes]."""

    def __init__(self, data: Tensor) -> None:
        """data: uint8 [bytes] on any device; later work in the same stream must not change it"""
        self._event = torch.cuda.Event() if data.is_cuda else None  # type: ignore[no-untyped-call]
        self._data = data
        if self._event is not None:
            self._data = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
            self._data.copy_(data, non_blocking=True)
            self._event.record()

    @property
    def nbytes(self) -> int:
        return self._data.numel()

    def read(self) -> Tensor:
        """Waits for the copy and returns it. Any thread may call it."""
        if self._event is not None:
            self._event.synchronize()
        return self._data


class Buffers:
    """Memory for copies of pages, which is used again when a copy is written: the system takes six times as long to
    give a process new memory as the copy takes.

    sizes: bytes of the memory's pieces, ascending; a larger copy gets memory of its own
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._free: list[tuple[int, deque[Tensor]]] = [(size, deque()) for size in sizes]

    def copied(self, nbytes: int, copy: Callable[[Tensor], object]) -> HostBytes:
        """Has `copy` fill uint8 [nbytes] on the host. Only the compute loop's thread may call it."""
        size, free = next((one for one in self._free if one[0] >= nbytes), (nbytes, deque[Tensor]()))
        buffer = free.popleft() if free else torch.empty(size, dtype=torch.uint8)
        copy(buffer[:nbytes])
        data = HostBytes(buffer[:nbytes])
        weakref.finalize(data, _give_back, free, buffer).atexit = False  # in the thread that drops the last reference
        return data


def _give_back(free: deque[Tensor], buffer: Tensor) -> None:
    if len(free) * buffer.numel() < KEPT_BYTES:
        free.append(buffer)


class StoredPages:
    """The pages and states of a cache as bytes. Only the compute loop's thread may call gather() and scatter().

    block: how many pages a file has
    """

    def __init__(self, cache: KVCache, fingerprint: str, block: int = 0) -> None:
        self.block = block or max(1, BLOCK_TOKENS // cache.page_size)
        self.page_size, self._device, self.fingerprint = cache.page_size, cache.device, fingerprint
        self._groups = [
            [_as_bytes(part.flatten(2)) for part in cache.tensors_of(group)] for group in range(len(cache.groups))
        ]
        # [slots, bytes] of every tensor of every layer with a state
        self._states = [_as_bytes(part.flatten(1)) for one in cache.states.values() for part in (one.tail, one.memory)]
        self.windows = tuple(group.window for group in cache.groups)
        self.page_bytes = tuple(sum(part.shape[0] * part.shape[2] for part in parts) for parts in self._groups)
        self.state_bytes = sum(part.shape[1] for part in self._states)
        # between two states that are kept, so that states take no more room than the pages between them
        self.state_every = self.state_bytes * cache.page_size // max(1, sum(self.page_bytes))  # tokens
        whole = (0,) * len(self.windows)
        self._buffers = Buffers(sorted({self.nbytes(self.block, whole, state=state) for state in (False, True)}))
        self.space = blake2b(_layout(cache, fingerprint, self.block), digest_size=32).digest()

    def nbytes(self, pages: int, absent: Sequence[int], *, state: bool) -> int:
        """Returns the size of a payload. absent: see Head"""
        present = zip(absent, self.page_bytes, strict=True)
        return sum((pages - missing) * each for missing, each in present) + state * self.state_bytes

    def gather(self, pages: Sequence[Sequence[int]], slot: int | None = None) -> HostBytes:
        """Copies pages of each group, and the state of a slot, to the host.

        A part of a layer's tensor is [layer of the group, page, bytes of a page]: all layers of a page, page by page.
        """
        sizes = [len(own) * each for own, each in zip(pages, self.page_bytes, strict=True)]
        nbytes, copy = sum(sizes) + (slot is not None) * self.state_bytes, partial(self._copy, pages, slot)
        if self._device.type == "cpu":
            return self._buffers.copied(nbytes, copy)
        copy(data := torch.empty(nbytes, dtype=torch.uint8, device=self._device))
        return HostBytes(data)

    def _copy(self, pages: Sequence[Sequence[int]], slot: int | None, data: Tensor) -> None:
        begin = 0
        for tensors, own in zip(self._groups, pages, strict=True):
            index = torch.tensor(list(own), dtype=torch.int64, device=self._device)
            for part in tensors:
                layers, _, each = part.shape
                rows = data[begin : begin + layers * len(own) * each].view(layers, len(own), each)
                torch.index_select(part, 1, index, out=rows)
                begin += rows.numel()
        if slot is not None:
            torch.cat([part[slot] for part in self._states], out=data[begin:])

    def split(self, payload: Tensor, pages: int, absent: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Returns the bytes of each group, and those of the state. payload: uint8 [bytes] as gather() makes it"""
        sizes = [(pages - missing) * each for missing, each in zip(absent, self.page_bytes, strict=True)]
        parts = list(torch.split(payload, [*sizes, payload.numel() - sum(sizes)]))
        return parts[:-1], parts[-1]

    def scatter(self, group: int, data: Tensor, first: int, pages: Sequence[int]) -> None:
        """Copies bytes into pages of a group.

        data: the bytes of a run of pages of the group, as split() returns them; first: the index in this run of the
        page that goes to pages[0]
        """
        begin = 0
        for part in self._groups[group]:
            layers, _, each = part.shape
            count = data.numel() // self.page_bytes[group]
            rows = data[begin : begin + layers * count * each].view(layers, count, each)
            for index, page in enumerate(pages, first):
                part[:, page].copy_(rows[:, index], non_blocking=True)
            begin += layers * count * each

    def scatter_state(self, data: Tensor, slot: int) -> None:
        """Copies the bytes of a state, uint8 [state_bytes], into a slot."""
        parts = torch.split(data, [part.shape[1] for part in self._states])
        for part, own in zip(self._states, parts, strict=True):
            part[slot].copy_(own, non_blocking=True)


def _as_bytes(part: Tensor) -> Tensor:
    """Returns a view of a tensor as bytes in its last dimension."""
    return part.view(torch.uint8)


def _layout(cache: KVCache, fingerprint: str, block: int) -> bytes:
    """Returns everything that two caches must have in common, so that the bytes of one mean the same in the other."""
    facts: dict[str, Any] = {
        "fingerprint": fingerprint,
        "page_size": cache.page_size,
        "block": block,
        "groups": [
            {
                "window": group.window,
                "layers": group.layers,
                "tensors": [_format(part) for part in cache.tensors_of(number)],
                "paired": [v_is_paired(v[0]) for v in cache.tensors_of(number)[1::2]],
                "transposed": [k_is_transposed(v[0]) for v in cache.tensors_of(number)[1::2]],
            }
            for number, group in enumerate(cache.groups)
        ],
        "states": {
            str(layer): [_format(part) for part in (one.tail, one.memory)] for layer, one in cache.states.items()
        },
    }
    return json.dumps(facts, sort_keys=True).encode()


def _format(part: Tensor) -> list[Any]:
    """Returns what a tensor is, without the number of its pages or slots, which is its first or second dimension."""
    shape = list(part.shape)
    shape[1 if part.dim() == 5 else 0] = -1
    return [str(part.dtype), part.device.type, *shape]
