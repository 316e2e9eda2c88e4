"""The tensors of the K/V cache. pages.py tracks which page belongs to which sequence."""

import mmap

import torch
from torch import Tensor

from worker.kernels.eight_bit_kv import row_elements
from worker.kv_cache.prefault import Prefaulter, Touch
from worker.model.spec import ModelSpec


class KVCache:
    """Holds `k` and `v`, each [layer, page, offset, kv_head, head_dim], initially zero. Page 0 is the scratch page.

    On the CPU, rows of eight bits are 4 bytes longer, for their scale (kernels/eight_bit_kv.py).
    """

    def __init__(
        self, spec: ModelSpec, pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.pages, self.page_size = pages, page_size
        row = row_elements(spec.head_dim, dtype, device)
        shape = (len(spec.layers), pages, page_size, spec.kv_heads, row)
        self.k = _zeros(shape, dtype, torch.device(device))
        self.v = _zeros(shape, dtype, torch.device(device))
        self._layers = list(zip(self.k.unbind(), self.v.unbind(), strict=True))
        self._prefaulter: Prefaulter | None = None

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns K and V of one layer, each [page, offset, kv_head, head_dim]."""
        return self._layers[index]

    def prefault_ahead(self, touch: Touch) -> None:
        """Starts to prefault memory ahead of its use (prefault.py). CPU only: its system provides memory lazily."""
        if self.k.device.type == "cpu" and self._prefaulter is None:
            self._prefaulter = Prefaulter(touch, [part for layer in self._layers for part in layer])

    def reach(self, page: int) -> None:
        """Notes that a step uses pages up to this one, so that memory after it is prefaulted."""
        if self._prefaulter is not None:
            self._prefaulter.reach(page)


def kv_format(name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that K/V is stored in. name: the value of --kv-cache-dtype; dtype: the dtype of the model."""
    return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(name, dtype)


def bytes_per_page(spec: ModelSpec, page_size: int, dtype: torch.dtype, device: torch.device | str) -> int:
    """Returns the size in bytes of the K and V of `page_size` tokens in all layers."""
    row = row_elements(spec.head_dim, dtype, device)
    return 2 * len(spec.layers) * page_size * spec.kv_heads * row * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of zeros. On the CPU, memory is taken only where it is written: fresh system pages are zero."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
