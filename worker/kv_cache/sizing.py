"""Computes the size of the K/V pool from a flag, or from the free memory.

On the CPU the pool gets a share of the memory that the system has available. On a GPU it gets the part of this worker's
share of the device that the weights and the largest step leave (worker/model_runner/warmup.py measures the step). The
sizes are plain arithmetic; only GpuMemoryReader, at the end, reads a device.

    │ weights, CUDA itself, other processes │ a step │ graphs, reserve │ pool │    not for this worker    │
    0                                                       --gpu-memory-utilization of it          total
"""

import gc
import logging
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.machine import CPU_SHARE, Memory, available_bytes
from worker.kv_cache.pages import PagePool, chunk_pages, chunk_tokens, usable_slots, window_pages
from worker.kv_cache.tensors import CacheGroup, bytes_per_page, bytes_per_state, cache_groups
from worker.spec import ModelSpec

GIB = 1 << 30
TYPICAL_TOKENS = 4096  # pools are sized so that sequences of this length fill pools with and without a window alike
CONTIGUOUS_SEQ_LEN = 4096  # default --max-seq-len with --kv-cache-backend contiguous, where a sequence reserves it all
STATES_SHARE = 2  # recurrent states get at most 1 / STATES_SHARE of the pool's memory
RESERVED_BYTES = 512 << 20  # GPU memory for unmeasured use: kernels loaded later, CUDA graph records, fragmentation


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The sizes of the pools of all groups of layers. pages: pages of each group, including its scratch page.

    state_slots: slots for recurrent states, including the scratch slot; 0 if no layer has a recurrent state.
    """

    pages: tuple[int, ...]
    page_size: int
    max_seq_len: int
    groups: tuple[CacheGroup, ...]
    page_bytes: tuple[int, ...]  # bytes of one page, for each group
    state_slots: int = 0
    state_bytes: int = 0  # bytes of one slot, in all layers

    @property
    def nbytes(self) -> int:
        pages = sum(pages * nbytes for pages, nbytes in zip(self.pages, self.page_bytes, strict=True))
        return pages + self.state_slots * self.state_bytes

    def pools(self) -> tuple[PagePool, ...]:
        """Makes the pools, with all pages free."""
        both = zip(self.pages, self.groups, strict=True)
        return tuple(PagePool(pages, self.page_size, group.window) for pages, group in both)

    def slots(self) -> PagePool | None:
        """Makes the pool of slots for recurrent states, if layers have them."""
        return PagePool(self.state_slots, self.page_size) if self.state_slots else None

    def __str__(self) -> str:
        parts = zip(self.pages, self.groups, self.page_bytes, strict=True)
        pools = [f"{pages - 1} for {group} ({pages * nbytes / GIB:.3g} GiB)" for pages, group, nbytes in parts]
        states = ""
        if self.state_slots:
            states = f"{self.state_slots - 1} recurrent states ({self.state_slots * self.state_bytes / GIB:.3g} GiB); "
        return f"pages of {self.page_size} tokens: {', '.join(pools)}; {states}sequences up to {self.max_seq_len}"


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """How many bytes the pool may take. remedy: the advice in the error message if the budget is too small."""

    nbytes: int
    remedy: str


@dataclass(frozen=True, slots=True)
class WeightsSize:
    """How many bytes the weights of a model take in memory; known before the weights are read.

    int4: bytes of the weights with --quantization int4; None if they are quantized already.
    drafter: how many of these bytes the draft model of --speculative-config takes, with its cache.
    """

    nbytes: int
    int4: int | None = None
    drafter: int = 0

    def with_others(self, nbytes: int, drafter: int = 0) -> "WeightsSize":
        """Returns the size plus `nbytes` of weights that --quantization does not change, and plus a draft model."""
        more = nbytes + drafter
        return WeightsSize(self.nbytes + more, None if self.int4 is None else self.int4 + more, drafter)

    def of_rank(self, count: int) -> "WeightsSize":
        """Returns about how much one of `count` ranks has of the weights."""
        return WeightsSize(self.nbytes // count, None if self.int4 is None else self.int4 // count, self.drafter)

    def fewer_bits(self, room: int) -> list[str]:
        """Returns the advice to use fewer bits, if the weights would then take at most `room` bytes."""
        if self.int4 is None or self.int4 > room:
            return []
        return [f"serve it with --quantization int4, which needs {self.int4 / GIB:.1f} GiB for its weights"]


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of a GPU at one moment, in bytes. Any process may use the memory that is not free."""

    name: str
    free: int
    total: int
    utilization: float  # --gpu-memory-utilization

    @property
    def available(self) -> int:
        """The number of bytes that this worker may still take."""
        return max(0, int(self.free - (1 - self.utilization) * self.total))

    def check_weights(self, weights: WeightsSize) -> None:
        """Raises ConfigError when the device cannot take the weights. Called before they are read."""
        if weights.nbytes > self.available:
            remedies = ", ".join([*weights.fewer_bits(self.available), _REMEDIES])
            raise ConfigError(f"the model's weights need {weights.nbytes / GIB:.2f} GiB, and {self}: {remedies}")

    def pool_budget(self, step: int, graphs: int) -> PoolBudget:
        """Returns the budget of the pool. The memory must have been read after the weights were loaded.

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
    state_dtype: torch.dtype = torch.float32,
) -> PoolSize:
    """Returns the largest sizes of the pools that fit in the budget. dtype, device: the dtype and device of K/V.

    state_dtype: the dtype of the model, in which recurrent layers keep their last inputs.

    Raises ConfigError, with advice, when not even one sequence of --max-seq-len fits. Without that flag, the maximum
    length of sequences is reduced instead.
    """
    max_seq_len = longest_sequence(spec, model, worker)
    size = page_size(max_seq_len, worker)
    groups = cache_groups(spec, max_seq_len, paged=worker.kv_cache_backend == "paged")
    page_bytes = tuple(bytes_per_page(spec, group, size, dtype, device) for group in groups)
    states = _States(bytes_per_state(spec, state_dtype), budget.nbytes // STATES_SHARE, size, worker)
    for typical in _typical_lengths(max_seq_len, required=model.max_seq_len > 0):
        shares = _Shares(groups, page_bytes, states, size, max_seq_len, typical, worker)
        full = bisect_right(range(worker.max_batch_size * shares.sequence + 1), budget.nbytes, key=shares.nbytes) - 1
        if shares.hold_a_sequence(full):
            break
    if not shares.hold_a_sequence(full):
        if model.max_seq_len or worker.kv_cache_backend == "contiguous" or full < 1:
            raise ConfigError(
                f"a K/V pool of {budget.nbytes / GIB:.3g} GiB does not hold one sequence of {max_seq_len} tokens "
                f"({shares.nbytes(shares.sequence) / GIB:.3g} GiB): {budget.remedy}"
            )
        max_seq_len = full * size
    return PoolSize(shares.pages(full), size, max_seq_len, groups, page_bytes, states.count(full), states.nbytes_each)


def _typical_lengths(longest: int, *, required: bool) -> Iterator[int]:
    """Yields values to try for `typical` (see _Shares). The caller stops once a sequence of `longest` tokens fits.

    required: whether to yield more than the first length. Greater lengths leave less memory for windows.
    """
    typical = min(TYPICAL_TOKENS, longest)
    yield typical
    while required and typical < longest:
        typical = min(2 * typical, longest)
        yield typical


@dataclass(frozen=True, slots=True)
class _States:
    """Computes how many slots for recurrent states go with `full` pages of a group without a window."""

    nbytes_each: int  # bytes of one slot; 0: no layer has a recurrent state
    most: int  # the maximum bytes of all slots together
    page_size: int
    worker: WorkerConfig

    def count(self, full: int) -> int:
        """Returns the number of slots, including the scratch slot."""
        if not self.nbytes_each:
            return 0
        worker = self.worker
        caches = worker.prefix_cache and worker.kv_cache_backend == "paged"
        checkpoints = full * self.page_size // worker.state_checkpoint_tokens if caches else 0
        affordable = self.most // self.nbytes_each - 1
        return 1 + usable_slots(affordable, worker.max_batch_size, checkpoints, overlap=worker.overlap)


@dataclass(frozen=True, slots=True)
class _Shares:
    """Computes the pages of each group if a group without a window gets `full` pages, not counting the scratch page.

    A group with a window gets pages for the windows of as many sequences of `typical` tokens as fit in `full` pages.
    Many short sequences then have enough windows, and a few long sequences can still use most of the memory.
    """

    groups: tuple[CacheGroup, ...]
    page_bytes: tuple[int, ...]
    states: _States
    page_size: int
    max_seq_len: int
    typical: int
    worker: WorkerConfig

    @property
    def sequence(self) -> int:
        """The number of pages of a sequence of max_seq_len tokens."""
        return -(-self.max_seq_len // self.page_size)

    def pages(self, full: int) -> tuple[int, ...]:
        """Returns the number of pages of each group, including its scratch page."""
        return tuple(1 + self._pages(group, full) for group in self.groups)

    def nbytes(self, full: int) -> int:
        pages = sum(count * nbytes for count, nbytes in zip(self.pages(full), self.page_bytes, strict=True))
        return pages + self.states.count(full) * self.states.nbytes_each

    def hold_a_sequence(self, full: int) -> bool:
        needed = (self._windows(group, 0) if group.window else self.sequence for group in self.groups)
        return all(pages > min(need, self.sequence) for pages, need in zip(self.pages(full), needed, strict=True))

    def _pages(self, group: CacheGroup, full: int) -> int:
        if not group.window:
            return full
        only_windows = all(other.window for other in self.groups)
        return min(full, self._windows(group, self.worker.max_batch_size * self.sequence if only_windows else full))

    def _windows(self, group: CacheGroup, full: int) -> int:
        """Returns how many pages a group with a window needs for the sequences that fit in `full` pages.

        These are the pages of their windows and of the chunks that a step computes, at least enough for one sequence.
        """
        window = window_pages(group.window, self.page_size)
        windows = -(-window * full * self.page_size // self.typical)
        most = window * self.worker.max_batch_size
        chunk = chunk_tokens(self.worker, self.max_seq_len)
        return max(window, min(windows, most)) + chunk_pages(chunk, self.page_size)


def configured_budget(worker: WorkerConfig, free: int | None = None) -> PoolBudget:
    """Returns the budget that --kv-cache-gb sets; without the flag, a share of the system's free memory (CPU only).

    free: bytes that are free for the pool on all hosts of --rank-group; None if this is the only host.
    """
    nbytes = int(worker.kv_cache_gb * GIB) or int(CPU_SHARE * (available_bytes() if free is None else free))
    return PoolBudget(nbytes, "raise --kv-cache-gb or lower --max-seq-len")


# Checks, before weights are read, whether a model fits in this machine's memory. Used when the CPU computes.
#
# A model that may fit is never refused, because other processes may free memory, and the K/V pool may stay empty.

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


# Reads how many bytes of memory a GPU has and how many a step needs. The pool is computed from these.


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
