"""How many pages the K/V pool gets: from a flag, or from the memory that is free.

On the CPU that is a share of what the system has left. On a GPU it is what remains of this worker's share of the
device beside the weights and the largest step, which run/warmup.py has measured. Plain arithmetic: nothing here asks
a device.

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
CONTIGUOUS_SEQ_LEN = 4096  # default where every sequence reserves its whole length
RESERVE = 512 << 20  # on a GPU, for what no rehearsal sees: kernels loaded later, graphs' own records, fragments


@dataclass(frozen=True, slots=True)
class Pool:
    """`pages` includes the scratch page."""

    pages: int
    page_size: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class Budget:
    """What the pool may take, and what to change should that be too little."""

    nbytes: int
    remedy: str


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """A GPU's memory at one moment, in bytes; what is not free may be any process's."""

    name: str
    free: int
    total: int
    utilization: float  # --gpu-memory-utilization

    @property
    def room(self) -> int:
        """What this worker may still take."""
        return max(0, int(self.free - (1 - self.utilization) * self.total))

    def check_weights(self, needed: int) -> None:
        """Before they are read. Raises ConfigError when the device cannot take so many bytes."""
        if needed > self.room:
            raise ConfigError(f"the model's weights need {needed / GIB:.2f} GiB, and {self}: {_LESS}")

    def pool(self, step: int, graphs: int) -> Budget:
        """Once the weights are there; `step` is what the largest step takes for a while, `graphs` what theirs keep."""
        left = max(0, self.room - step - graphs - RESERVE)
        remedy = (
            f"{self}, of which a step takes {(step + graphs) / GIB:.2f} GiB: raise --gpu-memory-utilization, or lower "
            "--max-seq-len, --max-step-tokens or --max-batch-size"
        )
        return Budget(left, remedy)

    def __str__(self) -> str:
        return (
            f"{self.name} has {self.room / GIB:.2f} GiB for more "
            f"({self.free / GIB:.2f} of {self.total / GIB:.2f} GiB are free, --gpu-memory-utilization is "
            f"{self.utilization:g})"
        )


_LESS = "end what else runs there, raise --gpu-memory-utilization, or serve a smaller model"


def longest(spec: ModelSpec, model: ModelConfig, worker: WorkerConfig) -> int:
    """Tokens of the longest sequence that the flags ask for. Raises ConfigError when the model was not made for it."""
    contiguous = worker.kv_cache_backend == "contiguous"
    wanted = model.max_seq_len or min(spec.max_positions, CONTIGUOUS_SEQ_LEN if contiguous else spec.max_positions)
    if wanted > spec.max_positions:
        raise ConfigError(f"--max-seq-len {wanted} is more than the {spec.max_positions} the model was made for")
    return wanted


def page_size(wanted: int, worker: WorkerConfig) -> int:
    """Tokens in a page, for sequences of at most `wanted`."""
    return wanted if worker.kv_cache_backend == "contiguous" else min(worker.page_size, wanted)


def size_pool(spec: ModelSpec, dtype: torch.dtype, budget: Budget, model: ModelConfig, worker: WorkerConfig) -> Pool:
    """Raises ConfigError when not even one sequence of --max-seq-len fits, naming what to change."""
    wanted = longest(spec, model, worker)
    size = page_size(wanted, worker)
    a_page = bytes_per_page(spec, size, dtype)
    a_sequence = -(-wanted // size)
    pages = min(budget.nbytes // a_page, worker.max_batch_size * a_sequence + 1)
    if pages < a_sequence + 1:
        if model.max_seq_len or worker.kv_cache_backend == "contiguous" or pages < 2:
            raise ConfigError(
                f"a K/V pool of {budget.nbytes / GIB:.3g} GiB does not hold one sequence of {wanted} tokens "
                f"({(a_sequence + 1) * a_page / GIB:.3g} GiB): {budget.remedy}"
            )
        wanted = (pages - 1) * size
    return Pool(pages, size, wanted)


def plain_budget(worker: WorkerConfig) -> Budget:
    """What --kv-cache-gb says, on any device; if it says nothing, on the CPU, a share of what is free."""
    given = int(worker.kv_cache_gb * GIB) or int(CPU_SHARE * available_bytes())
    return Budget(given, "raise --kv-cache-gb or lower --max-seq-len")
