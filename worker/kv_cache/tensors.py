"""The tensors of the K/V cache and of recurrent states. pages.py tracks which page belongs to which sequence."""

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.ops.paged_kv import FOUR_BITS, row_dtypes, row_elements
from worker.ops.recurrent_state import RecurrentState
from worker.spec import LayerSpec, ModelSpec

# Prefaults K/V memory: makes the system provide it before its first use, because page faults would slow down steps.
#
# The pool hands out fresh pages in ascending order, so the next pages are known. A thread of the lowest priority
# prefaults memory up to AHEAD_TOKENS ahead of the highest page in use.

AHEAD_TOKENS = 16_384
STRIDE_TOKENS = 256  # how many tokens one call of touch_next() covers
NICE = 19
Touch = Callable[[int, int], bool]  # called with (address, bytes); returns False if this system cannot prefault


class Prefaulter:
    """Touches pages ahead of the highest page passed to reach(). Its thread ends when the object is deleted."""

    def __init__(self, touch: Touch, arrays: Sequence[Tensor]) -> None:
        """arrays: K and V of every layer, each contiguous and of shape [pages, page_size, …]."""
        self._arrays = tuple(arrays)  # keeps the tensors alive while the thread touches their memory
        pages, page_size = arrays[0].shape[:2]
        regions = [(part.data_ptr(), part[0].nbytes) for part in arrays]
        self._ahead = _Ahead(
            touch, regions, pages, max(1, STRIDE_TOKENS // page_size), max(1, AHEAD_TOKENS // page_size)
        )
        weakref.finalize(self, self._ahead.stop)  # before the tensors are deleted, and before the process exits
        threading.Thread(target=self._ahead.run, name="prefault", daemon=True).start()

    @property
    def prefaulted(self) -> int:
        """The number of prefaulted pages, counted from page 0."""
        return self._ahead.done

    def reach(self, page: int) -> None:
        """Notes that pages up to `page` are in use. Costs almost nothing if a higher page was noted before."""
        if page > self._ahead.highest:
            self._ahead.highest = page
            self._ahead.wake.set()

    def touch_next(self) -> bool:
        """Touches the next STRIDE_TOKENS. Returns False if nothing is left to do until reach() is called."""
        return self._ahead.touch_next()


class _Ahead:
    """What the thread knows: numbers, not tensors. If it were the last to hold a tensor, it would run PyTorch's code to
    delete it, and a process that exits meanwhile would abort."""

    def __init__(self, touch: Touch, regions: list[tuple[int, int]], pages: int, stride: int, ahead: int) -> None:
        """regions: address and bytes of a page of each array"""
        self._touch, self._regions, self._pages, self._stride, self._ahead = touch, regions, pages, stride, ahead
        self.done = 0  # all pages below this one are prefaulted
        self.highest = 0
        self.wake = threading.Event()
        self._stopped = False
        self._touching = threading.RLock()  # a garbage collection in the thread may call stop()

    def stop(self) -> None:
        """Ends the thread. Returns when it touches no memory any more."""
        self._stopped = True
        self.wake.set()
        with self._touching:
            pass

    def touch_next(self) -> bool:
        first, end = self.done, min(self.done + self._stride, self._pages)
        if first == end or first >= self.highest + self._ahead:
            return False
        touched = True
        for start, size in self._regions:
            with self._touching:
                if self._stopped:
                    return False
                touched &= self._touch(start + first * size, (end - first) * size)
        self.done = end if touched else self._pages
        return True

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while not self._stopped:
            if not self.touch_next():
                self.wake.wait()
                self.wake.clear()


# Divides the layers of a model into groups. Layers with the same sliding window, or without one, form a group.
#
# The layers of a group share a page table: a page of the group holds K and V of `page_size` tokens in all its layers.
# Layers with a recurrent state, and layers that share the K/V of another layer, have no K/V of their own and are in
# no group. Each group has its own tensors and its own pool of pages (pages.py).


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A group of layers. window: the sliding window of its layers; 0: none. layers: the indices of its layers."""

    window: int
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        """Which positions of a sequence the group keeps: `window` (the last ones) or `full` (all)."""
        return "window" if self.window else "full"

    def __str__(self) -> str:
        return (
            f"{len(self.layers)} layers with a window of {self.window}" if self.window else f"{len(self.layers)} layers"
        )


def _keeps(layer: LayerSpec) -> bool:
    return not layer.recurrent and layer.shares is None


def one_group(spec: ModelSpec) -> tuple[CacheGroup]:
    """Returns a single group without a window that contains all layers with K/V."""
    return (CacheGroup(0, tuple(index for index, layer in enumerate(spec.layers) if _keeps(layer))),)


def cache_groups(spec: ModelSpec, max_seq_len: int, *, paged: bool) -> tuple[CacheGroup, ...]:
    """Returns the groups, the group without a window first.

    A window gets no group of its own if no sequence is longer than it. If `paged` is False, a sequence is one page,
    and all layers form one group.
    """
    if not paged:
        return one_group(spec)
    windows = {
        index: layer.window if layer.window < max_seq_len else 0
        for index, layer in enumerate(spec.layers)
        if _keeps(layer)
    }
    return tuple(
        CacheGroup(window, tuple(index for index, other in windows.items() if other == window))
        for window in sorted(set(windows.values()))
    )


class KVCache:
    """Holds K and V of all layers: for each group of layers `k` and `v`, each [layer of the group, page, offset,
    kv_head, head_dim], initially zero. Page 0 of a group is its scratch page. A group whose layers have heads of
    several shapes has tensors for each. In a model with latent attention, keys are the values, too: `v` is empty.

    On the CPU, rows of codes are longer, for their scale, and values may be in fewer bits than keys
    (worker/ops/paged_kv.py).

    `states` holds the recurrent states, by layer. The state of a sequence has the same slot in every layer. Slot 0 is
    the scratch slot.
    """

    def __init__(
        self,
        spec: ModelSpec,
        pages: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        groups: Sequence[CacheGroup] = (),
        state_slots: int = 0,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        """pages: the number of pages of each group. groups: by default, all layers with K/V are one group.

        dtype: as kv_format() returns it. state_slots: the number of slots, including the scratch slot.
        state_dtype: the dtype of the model.
        """
        self.groups = tuple(groups) or one_group(spec)
        self.pages, self.page_size, self.device = tuple(pages), page_size, torch.device(device)
        self.k, self.v = [], []
        self._of_group: list[list[Tensor]] = [[] for _ in self.groups]
        self.group_of: dict[int, int] = {}  # the index of each layer's group
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        for number, (group, count) in enumerate(zip(self.groups, pages, strict=True)):
            for (kv_heads, head_dim), layers in _by_shape(spec, group).items():
                outer = (len(layers), count, page_size, kv_heads)
                parts = [
                    _zeros((*outer, row_elements(head_dim, row, device)), row, self.device)
                    for row in row_dtypes(dtype)[: spec.kv_tensors]
                ]
                self.k.append(parts[0])
                self.v += parts[1:]
                self._of_group[number] += parts
                self._layers |= dict(zip(layers, zip(parts[0], parts[-1], strict=True), strict=True))
                self.group_of |= dict.fromkeys(layers, number)
        for index, layer in enumerate(spec.layers):
            if layer.shares is not None:
                self._layers[index], self.group_of[index] = self._layers[layer.shares], self.group_of[layer.shares]
        self.states = {
            index: RecurrentState.zeros(layer.state, state_slots, state_dtype, self.device)
            for index, layer in enumerate(spec.layers)
            if layer.state is not None
        }
        self._prefaulters: dict[int, Prefaulter] = {}  # index of a group → its prefaulter, if it has layers

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the K and V that a layer reads, each [page, offset, kv_head, head_dim]. Layers may share them.

        With latent attention, both are the same memory.
        """
        return self._layers[index]

    def tensors_of(self, group: int) -> list[Tensor]:
        """Returns K, V of each shape of heads in a group, each [layer, page, offset, kv_head, head_dim]; K alone if
        keys are the values, too.
        """
        return self._of_group[group]

    def prefault_ahead(self, touch: Touch) -> None:
        """On the CPU, starts to prefault memory ahead of its use, because the system maps it lazily."""
        if self.device.type == "cpu" and not self._prefaulters:
            self._prefaulters = {
                number: Prefaulter(touch, [*_distinct(self._layers[i] for i in group.layers)])
                for number, group in enumerate(self.groups)
                if group.layers
            }

    def reach(self, pages: Sequence[int]) -> None:
        """Notes the highest page that a step uses in each group, so that memory after it is prefaulted."""
        for number, page in enumerate(pages):
            if number in self._prefaulters:
                self._prefaulters[number].reach(page)


def _distinct(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
    """Yields the tensors of some pairs of K and V; one of a pair whose memory is the same."""
    for k, v in pairs:
        yield k
        if v.data_ptr() != k.data_ptr():
            yield v


def kv_format(name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that stands for the format of a cache. name: the value of --kv-cache-dtype; dtype: the dtype of
    the model.
    """
    return {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": FOUR_BITS}.get(name, dtype)


def bytes_per_page(
    spec: ModelSpec, group: CacheGroup, page_size: int, dtype: torch.dtype, device: torch.device | str
) -> int:
    """Returns the size in bytes of the K and V of `page_size` tokens in the layers of a group."""
    rows = row_dtypes(dtype)[: spec.kv_tensors]
    return page_size * sum(
        len(layers) * kv_heads * row_elements(head_dim, row, device) * row.itemsize
        for (kv_heads, head_dim), layers in _by_shape(spec, group).items()
        for row in rows
    )


def _by_shape(spec: ModelSpec, group: CacheGroup) -> dict[tuple[int, int], list[int]]:
    """Returns a map: (number of K/V heads, head_dim) → the layers of a group with this shape."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for index in group.layers:
        shapes.setdefault(spec.kv_shape(spec.layers[index]), []).append(index)
    return shapes


def bytes_per_state(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Returns the size in bytes of a slot in all layers with a recurrent state. dtype: the dtype of the model."""
    shapes = (layer.state for layer in spec.layers if layer.state is not None)
    states = (RecurrentState.zeros(shape, 1, dtype, torch.device("meta")) for shape in shapes)
    return sum(one.tail.nbytes + one.memory.nbytes for one in states)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of zeros. On the CPU, memory is taken only when it is written: fresh system pages are zero."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
