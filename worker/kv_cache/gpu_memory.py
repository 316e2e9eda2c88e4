"""Reads how much memory a GPU has and what a step takes of it, in bytes; budget.py draws the conclusions."""

import gc

import torch

from worker.kv_cache.sizing import GpuMemory


class Gpu:
    """One CUDA device, as its driver and PyTorch's allocator count."""

    def __init__(self, device: torch.device, utilization: float) -> None:
        """`utilization`: the share of it that is ours to fill."""
        self.name = torch.cuda.get_device_name(device)
        self._device = device
        self._utilization = utilization
        self._held = 0

    def look(self) -> GpuMemory:
        """Its memory now, once PyTorch has given back what it only caches."""
        self._tidy()
        free, total = torch.cuda.mem_get_info(self._device)
        return GpuMemory(self.name, free, total, self._utilization)

    def mark(self) -> None:
        """Starts a measurement, which grown() ends."""
        self._tidy()
        self._held = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def grown(self) -> int:
        """The most that PyTorch's allocator has held since mark(), beyond what it held then; fragments included."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - self._held

    def _tidy(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
