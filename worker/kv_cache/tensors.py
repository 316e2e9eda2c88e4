"""The tensors of the K/V cache and of recurrent states. pages.py tracks which page belongs to which sequence."""

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from worker.kernels.recurrent.recurrent_state import RecurrentState
from worker.kernels.weights.eight_bit_kv import row_elements
from worker.kv_cache.groups import CacheGroup, one_group
from worker.kv_cache.prefault import Prefaulter, Touch
from worker.spec import ModelSpec


class KVCache:
    """Holds K and V of all layers: for each group of layers `k` and `v`, each [layer of the group, page, offset,
    kv_head, head_dim], initially zero. Page 0 of a group is its scratch page. A group whose layers have heads of
    several shapes has tensors for each.

    On the CPU, 8-bit rows are 4 bytes longer, for their scale (kernels/weights/eight_bit_kv.py).

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

        dtype: the dtype of K and V. state_slots: the number of slots, including the scratch slot.
        state_dtype: the dtype of the model.
        """
        self.groups = tuple(groups) or one_group(spec)
        self.pages, self.page_size, self.device = tuple(pages), page_size, torch.device(device)
        self.k, self.v = [], []
        self.group_of: dict[int, int] = {}  # the index of each layer's group
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        for number, (group, count) in enumerate(zip(self.groups, pages, strict=True)):
            for (kv_heads, head_dim), layers in _by_shape(spec, group).items():
                shape = (len(layers), count, page_size, kv_heads, row_elements(head_dim, dtype, device))
                k, v = (_zeros(shape, dtype, self.device) for _ in "kv")
                self.k.append(k)
                self.v.append(v)
                self._layers |= dict(zip(layers, zip(k, v, strict=True), strict=True))
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
        """Returns the K and V that a layer reads, each [page, offset, kv_head, head_dim]. Layers may share them."""
        return self._layers[index]

    def prefault_ahead(self, touch: Touch) -> None:
        """On the CPU, starts to prefault memory ahead of its use (prefault.py), because the system maps it lazily."""
        if self.device.type == "cpu" and not self._prefaulters:
            self._prefaulters = {
                number: Prefaulter(touch, [part for layer in group.layers for part in self._layers[layer]])
                for number, group in enumerate(self.groups)
                if group.layers
            }

    def reach(self, pages: Sequence[int]) -> None:
        """Notes the highest page that a step uses in each group, so that memory after it is prefaulted."""
        for number, page in enumerate(pages):
            if number in self._prefaulters:
                self._prefaulters[number].reach(page)


def kv_format(name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that K/V is stored in. name: the value of --kv-cache-dtype; dtype: the dtype of the model."""
    return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(name, dtype)


def bytes_per_page(
    spec: ModelSpec, group: CacheGroup, page_size: int, dtype: torch.dtype, device: torch.device | str
) -> int:
    """Returns the size in bytes of the K and V of `page_size` tokens in the layers of a group."""
    elements = sum(
        len(layers) * kv_heads * row_elements(head_dim, dtype, device)
        for (kv_heads, head_dim), layers in _by_shape(spec, group).items()
    )
    return 2 * page_size * elements * dtype.itemsize


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
