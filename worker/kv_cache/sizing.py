"""Computes the size of the K/V pool from a flag, or from the free memory.

On the CPU the pool gets a share of the memory that the system has available. On a GPU it gets the rest of this worker's
share of the device after the weights and the largest step, which worker/run/warmup.py measures. This module is plain
arithmetic and reads no device.

    │ weights, CUDA itself, other processes │ a step │ graphs, reserve │ pool │         not ours          │
    0                                                       --gpu-memory-utilization of it          total
"""

from dataclasses import dataclass

import torch

from shared.config import ConfigError, ModelConfig, WorkerConfig
from shared.machine import CPU_SHARE, available_bytes
from worker.kv_cache.tensors import bytes_per_page
from worker.model.spec import ModelSpec

GIB = 1 << 30
CONTIGUOUS_SEQ_LEN = 4096  # default length for --kv-cache-backend contiguous, where each sequence reserves all of it
RESERVED_BYTES = 512 << 20  # on a GPU, for what is not measured: kernels loaded later, records of graphs, fragments


@dataclass(frozen=True, slots=True)
class PoolSize:
    """`pages` includes the scratch page."""

    pages: int
    page_size: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """How many bytes the pool may take. remedy: what the error message advises to change if that is too little."""

    nbytes: int
    remedy: str


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """A GPU's memory at one moment, in bytes. Memory that is not free may belong to any process."""

    name: str
    free: int
    total: int
    utilization: float  # --gpu-memory-utilization

    @property
    def available(self) -> int:
        """The number of bytes that this worker may still take."""
        return max(0, int(self.free - (1 - self.utilization) * self.total))

    def check_weights(self, needed: int) -> None:
        """Raises ConfigError when the device cannot take `needed` bytes. Called before the weights are read."""
        if needed > self.available:
            raise ConfigError(f"the model's weights need {needed / GIB:.2f} GiB, and {self}: {_REMEDIES}")

    def pool_budget(self, step: int, graphs: int) -> PoolBudget:
        """Returns the budget of the pool after the weights are loaded.

        step: bytes that the largest step takes while it runs; graphs: bytes that CUDA graphs keep.
        """
        left = max(0, self.available - step - graphs - RESERVED_BYTES)
        remedy = (
            f"{self}, of which a step takes {(step + graphs) / GIB:.2f} GiB: raise --gpu-memory-utilization, or lower "
            "--max-seq-len, --max-step-tokens or --max-batch-size"
        )
        return PoolBudget(left, remedy)

    def __str__(self) -> str:
        return (
            f"{self.name} has {self.available / GIB:.2f} GiB available "
            f"({self.free / GIB:.2f} of {self.total / GIB:.2f} GiB are free, --gpu-memory-utilization is "
            f"{self.utilization:g})"
        )


_REMEDIES = "end other processes there, raise --gpu-memory-utilization, or serve a smaller model"


def longest_sequence(spec: ModelSpec, model: ModelConfig, worker: WorkerConfig) -> int:
    """Returns the length of the longest sequence that the flags allow, in tokens.

    Raises ConfigError when the model does not support that length.
    """
    contiguous = worker.kv_cache_backend == "contiguous"
    max_seq_len = model.max_seq_len or min(spec.max_positions, CONTIGUOUS_SEQ_LEN if contiguous else spec.max_positions)
    if max_seq_len > spec.max_positions:
        raise ConfigError(f"--max-seq-len {max_seq_len} is more than the model's {spec.max_positions}")
    return max_seq_len


def page_size(max_seq_len: int, worker: WorkerConfig) -> int:
    """Returns the number of tokens in a page, for sequences of at most `max_seq_len` tokens."""
    return max_seq_len if worker.kv_cache_backend == "contiguous" else min(worker.page_size, max_seq_len)


def size_pool(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    budget: PoolBudget,
    model: ModelConfig,
    worker: WorkerConfig,
) -> PoolSize:
    """Returns the size of the pool, of K/V in `dtype` on `device`, that fits in the budget.

    Raises ConfigError, which names what to change, when not even one sequence of --max-seq-len fits. Without that flag,
    the pool limits the length of sequences instead.
    """
    max_seq_len = longest_sequence(spec, model, worker)
    size = page_size(max_seq_len, worker)
    page_bytes = bytes_per_page(spec, size, dtype, device)
    sequence_pages = -(-max_seq_len // size)
    pages = min(budget.nbytes // page_bytes, worker.max_batch_size * sequence_pages + 1)
    if pages < sequence_pages + 1:
        if model.max_seq_len or worker.kv_cache_backend == "contiguous" or pages < 2:
            raise ConfigError(
                f"a K/V pool of {budget.nbytes / GIB:.3g} GiB does not hold one sequence of {max_seq_len} tokens "
                f"({(sequence_pages + 1) * page_bytes / GIB:.3g} GiB): {budget.remedy}"
            )
        max_seq_len = (pages - 1) * size
    return PoolSize(pages, size, max_seq_len)


def configured_budget(worker: WorkerConfig) -> PoolBudget:
    """Returns the budget that --kv-cache-gb sets; without the flag, a share of the system's free memory (CPU only)."""
    nbytes = int(worker.kv_cache_gb * GIB) or int(CPU_SHARE * available_bytes())
    return PoolBudget(nbytes, "raise --kv-cache-gb or lower --max-seq-len")
