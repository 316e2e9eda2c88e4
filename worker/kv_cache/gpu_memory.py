"""Reads how many bytes of memory a GPU has and how many a step needs. sizing.py computes the pool from these."""

import gc

import torch

from worker.kv_cache.sizing import GpuMemory


class GpuMemoryReader:
    """Reads one CUDA device's memory, as its driver and PyTorch's allocator count it."""

    def __init__(self, device: torch.device, utilization: float) -> None:
        """utilization: the share of the device that this worker may fill."""
        self.name = torch.cuda.get_device_name(device)
        self._device = device
        self._utilization = utilization
        self._reserved_before = 0

    def read(self) -> GpuMemory:
        """Returns the memory of the device now, after PyTorch has released the memory that it only caches."""
        self._release_cached()
        free, total = torch.cuda.mem_get_info(self._device)
        return GpuMemory(self.name, free, total, self._utilization)

    def start_measurement(self) -> None:
        """Starts a measurement of memory; measured_growth() returns its result."""
        self._release_cached()
        self._reserved_before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def measured_growth(self) -> int:
        """Returns the maximum growth, since start_measurement(), of the memory that PyTorch's allocator has reserved.

        This includes fragmentation.
        """
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - self._reserved_before

    def _release_cached(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
