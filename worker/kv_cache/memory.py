"""Checks, before weights are read, whether a model fits in the memory of the machine or the GPU.

Checks, before weights are read, whether a model fits in this machine's memory. Used when the CPU computes.

A model that may fit is never refused, because other processes may free memory, and the K/V pool may stay empty.
"""

import gc
import logging

import torch

from shared.config.declaration import ConfigError
from shared.machine import Memory
from worker.kv_cache.sizing import GIB, GpuMemory, WeightsSize

log = logging.getLogger("sluice.load")
CLEARLY = 1.1  # a model that needs more than this many times the available memory is refused


def check_host_memory(weights: WeightsSize, pool: int, memory: Memory) -> None:
    """Raises ConfigError when the weights and a K/V pool of `pool` bytes clearly do not fit; warns when they may not.

    pool: 0 if it takes the memory that the weights leave. The error states the bytes needed and available, and a
    remedy.
    """
    needed, room = weights.nbytes + pool, memory.available + memory.swap
    if weights.nbytes <= memory.total + memory.swap and needed <= room:
        return
    for_pool = f" and {_gib(pool)} for the K/V pool" if pool else ""
    message = (
        f"the model needs {_gib(weights.nbytes)} for its weights{for_pool}, but {_gib(memory.available)} of "
        f"{_gib(memory.total)} are available: {', or '.join(_remedies(weights, pool, memory, room))}"
    )
    if weights.nbytes > memory.total + memory.swap or needed > CLEARLY * room:
        raise ConfigError(message)
    log.warning("%s", message)


def check_host_of_several(weights: WeightsSize, pool: int, hosts: int, memory: Memory) -> None:
    """Raises ConfigError when this host's part of the weights and of the K/V pool clearly does not fit.

    weights, pool: sizes for the whole model; pool is 0 if it takes the memory that the weights leave.
    hosts: how many hosts share the model.
    """
    part, room = (weights.nbytes + pool) // hosts, memory.available + memory.swap
    if part > CLEARLY * room:
        raise ConfigError(
            f"each of {hosts} hosts needs {_gib(part)} for its part of the model, but {_gib(memory.available)} of "
            f"{_gib(memory.total)} are available: use more hosts, weights in fewer bits, or a lower --kv-cache-gb"
        )


def _remedies(weights: WeightsSize, pool: int, memory: Memory, room: int) -> list[str]:
    found, left = weights.fewer_bits(room - pool), _tenths(room - weights.nbytes)
    if pool and left:
        found.append(f"lower --kv-cache-gb to {left}")
    elif not found and weights.int4 is not None:
        left = _tenths(room - weights.int4)
        found = [f"{advice}, with --kv-cache-gb {left}" for advice in weights.fewer_bits(room)]
    if weights.drafter and weights.nbytes - weights.drafter + pool <= room:
        needs = f"drafts of a model need {_gib(weights.drafter)} of it"
        found.append(f"leave out --speculative-config, or use --speculation ngram: {needs}")
    if weights.nbytes <= memory.total:
        found.append("end other processes")
    return [*found, "serve a smaller model"]


def _tenths(nbytes: int) -> float:
    """Returns a number of bytes in GiB, rounded down to tenths; 0 if it is negative."""
    return max(0, 10 * nbytes // GIB) / 10


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"


# Reads how many bytes of memory a GPU has and how many a step needs. sizing.py computes the pool from these.


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
