"""From a model's name to a runner: checkpoint, weights, K/V pool, scheduler; each part reports how far it is."""

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from shared.config import ConfigError, ModelConfig, WorkerConfig
from shared.default_sizes import with_default_sizes
from shared.hf_hub import Progress
from shared.messages import Limits
from worker.grammar.compiler import GrammarCompiler
from worker.kernels.cpu import bindings
from worker.kernels.operations import TORCH
from worker.kernels.quantize import Scheme
from worker.kv_cache.gpu_memory import GpuMemoryReader
from worker.kv_cache.pages import PagePool
from worker.kv_cache.sizing import PoolSize, configured_budget, longest_sequence, size_pool
from worker.kv_cache.tensors import Cache, kv_format
from worker.model.checkpoint import CheckpointError, read_config, resolve, stored_bytes, tokenizer_ends
from worker.model.cpu_decoder import fastest_decoder
from worker.model.decoder import Decoder, Weights
from worker.model.device import check_format, computable, pick_device
from worker.model.families import spec_from_config
from worker.model.quantization import describe, scheme_in_memory
from worker.model.spec import ModelSpec
from worker.model.weights import load
from worker.run.kernel_check import choose_operations
from worker.run.runner import Runner
from worker.run.warmup import StepLimits, first_decodes, warm_up
from worker.schedule.policy import SchedulerConfig
from worker.schedule.scheduler import Scheduler

log = logging.getLogger("sluice.load")

CACHED = 64 << 20  # bytes of weights that processors may keep in their caches


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model, ready to step."""

    runner: Runner
    scheduler: Scheduler
    pool: PagePool
    spec: ModelSpec
    limits: Limits
    tokenizer_hash: str
    compiler: GrammarCompiler
    device: str
    dtype: str
    kernels: str


def load_engine(
    model: ModelConfig,
    worker: WorkerConfig,
    on_progress: Progress = lambda done, total: None,
    on_download: Progress = lambda done, total: None,
    *,
    prefer_cache: bool = False,
) -> Engine:
    """`prefer_cache`: the checkpoint that is in the cache will do, even if the hub has a newer one.

    Raises ConfigError (flags that do not fit the model or the machine), CheckpointError, or DeviceBroken (a GPU that a
    kernel has left unusable), in one sentence.
    """
    device = pick_device(worker.device)
    worker = with_default_sizes(worker, on_gpu=device.type == "cuda")
    folder = resolve(model.model, model.revision, prefer_cache=prefer_cache, on_progress=on_download)
    spec, tokenizer_hash = _spec(folder), _hash(folder)
    dtype, kv, scheme = _formats(spec, worker, device)
    longest_sequence(spec, model, worker)  # raises before the weights are read
    compiler = GrammarCompiler(folder, spec.vocab_size, spec.eos_ids)
    gpu = GpuMemoryReader(device, worker.gpu_memory_utilization) if device.type == "cuda" else None
    moved = partial(on_progress, 1, 1)
    with _no_room(gpu):
        weights = load(
            folder, spec, dtype, device, invariant=worker.batch_invariant, scheme=scheme, on_progress=on_progress,
            on_size=gpu.read().check_weights if gpu else lambda needed: None,
        )  # fmt: skip
        size, decoder = _sized(spec, weights, kv, model, worker, gpu, moved)
        cache = Cache(spec, size.pages, size.page_size, kv, device)
    log.info(
        "%s on %s in %s, K/V in %s: %d pages of %d tokens, sequences up to %d",
        spec.model_type, gpu.name if gpu else device, dtype, kv, size.pages - 1, size.page_size, size.max_seq_len,
    )  # fmt: skip
    exact = gpu is None and kv is dtype and bindings.available(dtype)
    worker = _speculating(worker, pays=exact and stored_bytes(folder) > CACHED)
    if gpu is None:
        _warn(worker, dtype, kv)
        _prepare(cache)
    pool = PagePool(size.pages, size.page_size)
    runner = _runner(decoder, cache, worker, on_gpu=gpu is not None)
    if gpu is not None:
        warm_up(runner, first_decodes(StepLimits.of(worker, size.max_seq_len)), moved)
    return Engine(
        runner=runner,
        scheduler=Scheduler(SchedulerConfig.of(worker, size.max_seq_len, frozenset(spec.eos_ids)), pool),
        pool=pool,
        spec=spec,
        limits=Limits(size.max_seq_len, spec.vocab_size, spec.eos_ids),
        tokenizer_hash=tokenizer_hash,
        compiler=compiler,
        device=str(device),
        dtype=_format(dtype, scheme if gpu is not None else None),
        kernels=_kernels(decoder, dtype),
    )


def _spec(folder: Path) -> ModelSpec:
    spec = spec_from_config(read_config(folder))
    return replace(spec, eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *tokenizer_ends(folder)))))


def _formats(
    spec: ModelSpec, worker: WorkerConfig, device: torch.device
) -> tuple[torch.dtype, torch.dtype, Scheme | None]:
    """What the model computes with, what K/V are kept in, and how linears are quantized in memory, if they are.

    Raises ConfigError when the flags do not fit the checkpoint or the device.
    """
    dtype = _format_of_weights(spec, worker.dtype, device)
    kv = kv_format(worker.kv_cache_dtype, dtype)
    for needed in (dtype, kv):
        check_format(device, needed)
    scheme = computable(scheme_in_memory(spec.stored, worker.quantization), device, worker.quantization)
    if quantized := describe(spec.stored, scheme, dtype, device):
        log.info("%s", quantized)
    return dtype, kv, scheme


def _format_of_weights(spec: ModelSpec, wanted: str, device: torch.device) -> torch.dtype:
    """The checkpoint's, where nobody wants another; but on the CPU, which has no kernels for it, float16 is widened."""
    if wanted == "auto" and spec.dtype == "float16" and device.type == "cpu":
        log.info("the checkpoint's float16 is computed in float32 here; --dtype bfloat16 takes half the memory")
        return torch.float32
    dtype: torch.dtype = getattr(torch, spec.dtype if wanted == "auto" else wanted)
    return dtype


def _speculating(worker: WorkerConfig, *, pays: bool) -> WorkerConfig:
    """Where nobody said: where it `pays`. Not on a GPU, where it costs graphs and the next step launched ahead; not
    without the C kernels, which give a row the same bits in any step; nor for a model that caches hold, as most of its
    step is no reading of weights."""
    if worker.speculation != "auto":
        return worker
    return replace(worker, speculation="ngram" if pays else "off")


def _warn(worker: WorkerConfig, dtype: torch.dtype, kv: torch.dtype) -> None:
    """Of flags that do nothing on the CPU, and of what it computes without the C kernels."""
    if worker.kernels != "auto":
        log.warning(
            "--kernels %s is for GPUs: the CPU has C kernels, or plain PyTorch with SLUICE_NATIVE=0", worker.kernels
        )
    if worker.batch_invariant and not bindings.available(dtype):
        log.warning("--batch-invariant: no C kernels for %s here, so bits may depend on who shares a step", dtype)
    if kv is not dtype:
        log.warning(
            "--kv-cache-dtype saves memory here, not time: no C kernels read %s, plain PyTorch does, and bits may "
            "depend on who shares a step", kv,
        )  # fmt: skip


def _prepare(cache: Cache) -> None:
    """Asks the system for huge pages, and for memory ahead of its use."""
    for part in (cache.k, cache.v):
        bindings.huge_pages(part)
    cache.prefault_ahead(bindings.touch_pages)


def _runner(decoder: Decoder, cache: Cache, worker: WorkerConfig, *, on_gpu: bool) -> Runner:
    return Runner(
        fastest_decoder(decoder, cache),
        cache,
        max_batch_size=worker.max_batch_size,
        overlap=worker.overlap and on_gpu,
        graphs=worker.cuda_graphs and on_gpu and decoder.operations is not TORCH,  # which ask the device on the way
    )


def _sized(
    spec: ModelSpec,
    weights: Weights,
    kv: torch.dtype,
    model: ModelConfig,
    worker: WorkerConfig,
    gpu: GpuMemoryReader | None,
    moved: Callable[[], None],
) -> tuple[PoolSize, Decoder]:
    """The pool's size, and a decoder for sequences as long as it allows.

    On a GPU the kernels are chosen and compiled first, which shows what memory they leave for the pool.
    """
    if gpu is None:
        size = size_pool(spec, kv, configured_budget(worker), model, worker)
        return size, Decoder(spec, weights, size.max_seq_len)
    log.info("preparing kernels for %s", gpu.name)
    length = longest_sequence(spec, model, worker)
    decoder, measured = choose_operations(Decoder(spec, weights, length), worker, length, gpu, moved)
    return size_pool(spec, kv, configured_budget(worker) if worker.kv_cache_gb else measured, model, worker), decoder


@contextmanager
def _no_room(gpu: GpuMemoryReader | None) -> Iterator[None]:
    """Turns whatever error means "out of memory" into a ConfigError that says what to change."""
    try:
        yield
    except (RuntimeError, OSError) as error:  # torch's, the driver's own by way of CUDA or Triton, or the system's
        if not any(words in str(error) for words in ("out of memory", "allocate memory")):
            raise
        name = gpu.name if gpu else "the device"
        raise ConfigError(
            f"{name} has no room for this model with these settings ({_in_short(error)}): end what else runs there, "
            "or lower --kv-cache-gb, --max-seq-len, --max-step-tokens or --max-batch-size, or serve a smaller model"
        ) from error


def _in_short(error: Exception) -> str:
    """The first two sentences of the first line: in them PyTorch says what happened."""
    return ". ".join(str(error).split("\n")[0].split(". ")[:2])


def _format(dtype: torch.dtype, scheme: Scheme | None) -> str:
    """What numbers are in memory, as Status tells it."""
    plain = str(dtype).removeprefix("torch.")
    return f"{plain}, {scheme} weights" if scheme else plain


def _kernels(decoder: Decoder, dtype: torch.dtype) -> str:
    """What computes, as Status tells it."""
    if decoder.operations is TORCH:
        return "torch"
    if decoder.weights.embed.is_cuda:
        return "triton"
    return "c" if bindings.available(dtype) else "torch"


def _hash(folder: Path) -> str:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise CheckpointError(f"{folder}: tokenizer.json is missing")
    return hashlib.sha256(file.read_bytes()).hexdigest()
