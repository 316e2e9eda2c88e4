"""What a GPU says of its memory. All numbers are bytes; what they mean is budget.py's."""

import gc

import torch

from worker.memory.budget import Device


class Gpu:
    """One CUDA device, as its driver and PyTorch's allocator count."""

    def __init__(self, device: torch.device, utilization: float) -> None:
        """`utilization`: the share of it that is ours to fill."""
        self.name = torch.cuda.get_device_name(device)
        self._device = device
        self._utilization = utilization
        self._held = 0

    def look(self) -> Device:
        """As it is now, without what PyTorch holds for nothing."""
        self._tidy()
        free, total = torch.cuda.mem_get_info(self._device)
        return Device(self.name, free, total, self._utilization)

    def mark(self) -> None:
        """Measure from here."""
        self._tidy()
        self._held = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def grown(self) -> int:
        """By how much PyTorch's allocator held more at its height than at the mark: tensors and the gaps between."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - self._held

    def _tidy(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
