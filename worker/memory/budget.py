"""How many pages the K/V pool gets: from a flag, or from the memory that is free once the weights are loaded."""

from dataclasses import dataclass

import torch

from shared.config import ConfigError, ModelConfig, WorkerConfig
from shared.machine import CPU_SHARE, available_bytes
from worker.memory.cache import bytes_per_page
from worker.model.spec import ModelSpec

GIB = 1 << 30
CONTIGUOUS_SEQ_LEN = 4096  # default where every sequence reserves its whole length


@dataclass(frozen=True, slots=True)
class Pool:
    """`pages` includes the scratch page."""

    pages: int
    page_size: int
    max_seq_len: int


def size_pool(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, model: ModelConfig, worker: WorkerConfig
) -> Pool:
    """Raises ConfigError when not even one sequence of --max-seq-len fits, naming what to change."""
    contiguous = worker.kv_cache_backend == "contiguous"
    wanted = model.max_seq_len or min(spec.max_positions, CONTIGUOUS_SEQ_LEN if contiguous else spec.max_positions)
    if wanted > spec.max_positions:
        raise ConfigError(f"--max-seq-len {wanted} is more than the {spec.max_positions} the model was made for")
    page_size = wanted if contiguous else min(worker.page_size, wanted)
    a_page = bytes_per_page(spec, page_size, dtype)
    budget = int(worker.kv_cache_gb * GIB) if worker.kv_cache_gb else free_bytes(device, worker)
    a_sequence = -(-wanted // page_size)
    pages = min(budget // a_page, worker.max_batch_size * a_sequence + 1)
    if pages < a_sequence + 1:
        if model.max_seq_len or contiguous or pages < 2:
            raise ConfigError(
                f"a K/V pool of {budget / GIB:.2f} GiB does not hold one sequence of {wanted} tokens "
                f"({a_sequence * a_page / GIB:.2f} GiB): raise --kv-cache-gb or lower --max-seq-len"
            )
        wanted = (pages - 1) * page_size
    return Pool(pages, page_size, wanted)


def free_bytes(device: torch.device, worker: WorkerConfig) -> int:
    """What the pool may take of `device`, weights being loaded already."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - worker.gpu_memory_utilization) * total))
    return int(CPU_SHARE * available_bytes())
