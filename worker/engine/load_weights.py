"""Loads the weights of an engine. First checks that they fit in memory. On the CPU, it uses --weights-cache."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from shared.config import ModelConfig, WorkerConfig
from shared.hf_hub import Progress
from shared.machine import memory
from worker.engine.formats import Formats
from worker.kernels.cpu import bindings
from worker.kv_cache.gpu_memory import GpuMemoryReader
from worker.kv_cache.host_memory import check_host_memory, check_host_of_several
from worker.kv_cache.sizing import WeightsSize, configured_budget, size_pool
from worker.model.layer import Weights
from worker.model.parts.part import Part
from worker.model.weights import load
from worker.model.weights_cache.weights_cache import WeightsCache
from worker.spec import ModelSpec

log = logging.getLogger("sluice.load")


class Keep(Protocol):
    def __call__(self, on_progress: Progress = ...) -> None: ...


def load_weights(
    folder: Path,
    spec: ModelSpec,
    formats: Formats,
    device: torch.device,
    model: ModelConfig,
    worker: WorkerConfig,
    gpu: GpuMemoryReader | None,
    on_progress: Progress,
    part: Part | None = None,
    beside: int = 0,
    drafter: int = 0,
    hosts: int = 1,
) -> tuple[Weights, Keep]:
    """Loads all weights to the device, or those of one rank's part.

    Returns the weights, and a function that writes them to --weights-cache. The function does nothing without the flag,
    or if the weights come from there. Ranks call it when they have compared their weights.

    gpu: None on the CPU. beside: bytes of other weights that must also fit in the memory. drafter: bytes that a draft
    model takes in the memory. hosts: how many hosts have parts of the model, including this one.

    Raises CheckpointError, and ConfigError when the memory of the device is too small.
    """

    def check(text: WeightsSize) -> None:
        weights = text.with_others(beside, drafter)
        if gpu is not None:
            gpu.read().check_weights(weights if part is None else weights.of_rank(part.count))
            return
        pool = 0
        if worker.kv_cache_gb:  # without the flag, the pool takes a share of the memory that the weights leave
            pool = size_pool(
                spec, formats.kv_dtype, device, configured_budget(worker), model, worker, formats.dtype
            ).nbytes
        if hosts > 1:
            check_host_of_several(weights, pool, hosts, memory())
        else:
            check_host_memory(weights, pool, memory())

    read = partial(
        load, folder, spec, formats.dtype, device, invariant=worker.batch_invariant, memory=formats.memory,
        on_progress=on_progress, on_size=check,
    )  # fmt: skip
    if part is not None:
        read = partial(read, share=part.share, stage=part.stage)
    if gpu is not None:
        return read(), _keep_nothing
    begun = time.perf_counter()
    weights, keep = through_cache(read, worker, folder, formats, part, on_progress)
    took, resident, peak = time.perf_counter() - begun, *_resident_bytes()
    log.info(
        "weights: %.2f GB, loaded in %.1f s; resident memory: %.2f GB, at most %.2f GB",
        weights.nbytes / 1e9, took, resident / 1e9, peak / 1e9,
    )  # fmt: skip
    return weights, keep


def through_cache(
    read: Callable[[], Weights],
    worker: WorkerConfig,
    folder: Path,
    formats: Formats,
    part: Part | None,
    on_progress: Progress = lambda done, total: None,
) -> tuple[Weights, Keep]:
    """Returns the weights from --weights-cache, or else from `read`; and a function as load_weights does."""
    if not worker.weights_cache or not bindings.available(formats.dtype):  # only the C library packs weights
        return read(), _keep_nothing
    cache = WeightsCache.of(Path(worker.weights_cache), folder, formats.dtype, formats.memory, part)
    if (found := cache.read(on_progress)) is not None:
        return found, _keep_nothing
    weights = read()
    return weights, partial(cache.write, weights)


def _keep_nothing(on_progress: Progress = lambda done, total: None) -> None:
    pass


def _resident_bytes() -> tuple[int, int]:
    """Returns the resident memory of this process in bytes: the present value and the peak, as Linux reports them."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, most = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return now, most
