"""Loads an engine by the name of its model: the model (load_model.py), K/V pools, runner and scheduler.

Downloading, loading and warm-up report their progress.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shared.checkpoint import GENERATE, Task, is_encoder
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig, with_default_sizes
from shared.hf_hub import Progress
from shared.messages import Limits
from worker.checkpoint.checkpoint import read_config, stored_bytes
from worker.device import pick_device
from worker.engine.load_model import LoadedModel, explain_out_of_memory, find_folder, load_model, read_model
from worker.engine.metrics import ExpertLoads
from worker.engine.numerics import Formats, dtype_name, fingerprint, kernels_name, numerics_of, warn_about_cpu
from worker.kv_cache.pages import PagePool
from worker.kv_cache.sizing import GIB, GpuMemoryReader, PoolSize, configured_budget, longest_sequence, size_pool
from worker.kv_cache.tensors import KVCache
from worker.model_runner.runner import Runner
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder, Weights
from worker.models.forward_inputs import Model
from worker.operations import TORCH
from worker.ops import native as c_library
from worker.ops.native import huge_pages
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.spec import ModelSpec
from worker.structured_output.compiler import GrammarCompiler

if TYPE_CHECKING:  # features, which are imported at run time only when needed
    from worker.distributed.lora import AdaptersOfRanks
    from worker.distributed.rendezvous import Hosts
    from worker.engine.drafter import FoundDrafter
    from worker.vision.vision import Tower, Vision

log = logging.getLogger("sluice.load")

CAPPED_SHARE = 0.05  # a pool is called capped if it is smaller than --kv-cache-gb by more than this fraction
PROCESSOR_CACHE_BYTES = 64 << 20  # weights up to this size may stay in the processors' caches


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model, ready to step."""

    runner: Runner
    scheduler: Scheduler
    pools: tuple[PagePool, ...]  # one for each group of layers
    size: PoolSize
    spec: ModelSpec
    limits: Limits
    tokenizer_hash: str
    compiler: GrammarCompiler
    device: str
    dtype: str
    kernels: str
    batch_invariant: bool = True  # whether the bits of an answer depend on the request alone, according to checks
    fingerprint: str = ""  # hash of everything that decides the bits, see numerics.py
    expert_loads: Callable[[], ExpertLoads] = dict  # empty without --expert-metrics
    slots: PagePool | None = None  # slots for recurrent states; None if no layer has one
    task: Task = GENERATE
    folder: Path = Path()  # the folder of the checkpoint
    weights: Weights | None = None
    ranks: tuple[int, ...] = ()  # process ids of the ranks, if several ranks compute the model together
    adapters_of_ranks: "AdaptersOfRanks | None" = None  # gives adapters to the other ranks, if there are several
    stages: int = 1  # how many pipeline stages the ranks form
    tower: "Tower | None" = None  # the vision tower; None if config.json has none


def load_engine(
    model: ModelConfig,
    worker: WorkerConfig,
    on_progress: Progress = lambda done, total: None,
    on_download: Progress = lambda done, total: None,
    *,
    prefer_cache: bool = False,
    hosts: "Hosts | None" = None,
) -> Engine:
    """Loads the model and builds an engine that is ready to compute.

    prefer_cache: use the checkpoint in the cache, even if the hub has a newer one. hosts: the rendezvous of the
    processes of --rank-group; None without the flag.

    Raises one of these errors, with a message of one sentence:
        ConfigError: the flags do not fit the model or the machine.
        CheckpointError: the checkpoint cannot be loaded.
        DeviceBroken: a kernel has left the GPU unusable.
    """
    device = _device(worker, hosts)
    if device.type == "cuda" and worker.ranks > 1:
        from worker.distributed.nccl import check_features

        check_features(model, worker)
    worker = _settings_on(device, worker)
    folder = find_folder(model, on_download, prefer_cache=prefer_cache)
    if is_encoder(read_config(folder)):
        from worker.engine.build_encoder import load_encoder_engine

        return load_encoder_engine(folder, model, worker, on_progress)
    files = read_model(folder, model, worker, device)
    compiler = GrammarCompiler(files.folder, files.spec.vocab_size, files.spec.eos_ids)
    if worker.speculation == "auto" or worker.speculative_config:
        from worker.engine.drafter import load_with_drafter

        loaded, drafter = load_with_drafter(files, model, worker, on_progress, hosts)
    else:
        loaded, drafter = load_model(files, model, worker, on_progress, 0, hosts), None
    return build_engine(loaded, compiler, model, worker, partial(on_progress, 1, 1), drafter)


def _device(worker: WorkerConfig, hosts: "Hosts | None") -> torch.device:
    if worker.ranks == 1:
        return pick_device(worker.device)
    from worker.distributed.nccl import device_of_rank

    return device_of_rank(worker) if hosts is None else device_of_rank(worker, hosts.group.place, hosts.group.here)


def build_engine(
    loaded: LoadedModel,
    compiler: GrammarCompiler,
    model: ModelConfig,
    worker: WorkerConfig,
    on_progress: Callable[[], None],
    drafter: "FoundDrafter | None" = None,
) -> Engine:
    """Builds the engine around a loaded model: pools, cache, runner, scheduler.

    worker: the settings after _settings_on(). on_progress: called from time to time. drafter: is loaded if drafts are
    on. Raises the same errors as `load_engine`.
    """
    files, spec, formats, device = loaded.files, loaded.files.spec, loaded.files.formats, loaded.files.device
    worker = _with_whole_images(worker, loaded.tower)
    with explain_out_of_memory(loaded.gpu):
        decoder, cache, size, invariant = _fit_into_memory(loaded, model, worker, on_progress, drafter)
    worker = _resolve_speculation(replace(worker, batch_invariant=invariant), files.folder, formats, device)
    loads = _count_loads(decoder, loaded) if worker.expert_metrics else None
    vision = _vision(loaded.tower, decoder, worker)
    pools, slots = size.pools(), size.slots()
    config = SchedulerConfig.of(worker, size.max_seq_len, frozenset(spec.eos_ids))
    if device.type == "cpu":
        config = replace(config, cpu_vocab_size=spec.vocab_size)
    scheduler = Scheduler(config, pools, slots)
    runner = _runner_for(decoder, cache, loaded, worker, size, vision, on_progress)
    if drafter is not None and scheduler.speculation is not None:  # before the capture, as graphs keep hidden states
        scheduler.speculation.proposer = drafter.load_for(runner, loaded.weights, size, worker)
        scheduler.speculation.proposer.capture_graphs(on_progress)
    runner.capture_graphs(on_progress)
    kernels = kernels_name(decoder, formats.dtype)
    numerics = numerics_of(kernels, formats, device, batch_invariant=invariant and kernels != "torch")
    return Engine(
        runner=runner,
        scheduler=scheduler,
        pools=pools,
        slots=slots,
        task=files.task,
        folder=files.folder,
        weights=decoder.weights,
        tower=loaded.tower,
        size=size,
        spec=spec,
        limits=Limits(
            size.max_seq_len,
            spec.vocab_size,
            spec.eos_ids,
            spec.hidden_size,
            worker.max_batch_size + worker.max_waiting_requests,
            worker.max_batch_size,
        ),
        tokenizer_hash=files.tokenizer_hash,
        compiler=compiler,
        device=str(device),
        dtype=dtype_name(formats.dtype, formats.memory),
        kernels=kernels,
        batch_invariant=numerics.batch_invariant,
        fingerprint=fingerprint(
            loaded.hashes.wait(on_progress), files.tokenizer_hash, spec, numerics, vision.spec if vision else None
        ),
        expert_loads=dict if loads is None else _counting(loads, spec),
        ranks=() if loaded.ranks is None else loaded.ranks.pids,
        adapters_of_ranks=None if loaded.ranks is None else loaded.ranks.adapters,
        stages=worker.pipeline_parallel_size,
    )


def _fit_into_memory(
    loaded: LoadedModel,
    model: ModelConfig,
    worker: WorkerConfig,
    on_progress: Callable[[], None],
    drafter: "FoundDrafter | None",
) -> tuple[Decoder, KVCache, PoolSize, bool]:
    """Returns a decoder, its cache, the sizes of the pools, and whether bits are batch-invariant on this device."""
    formats, weights = loaded.files.formats, loaded.weights
    if loaded.ranks is None:
        decoder, size, invariant = _fit(loaded, model, worker, on_progress, drafter)
    else:
        decoder, size, invariant = _fit_ranks(loaded, model, worker, on_progress)
    groups = size.groups if loaded.ranks is None else loaded.ranks.part.stage.groups(size.groups)
    cache = KVCache(
        decoder.spec, size.pages, size.page_size, formats.kv_dtype, weights.embed.device, groups, size.state_slots,
        formats.dtype,
    )  # fmt: skip
    return decoder, cache, size, invariant


def _fit(
    loaded: LoadedModel,
    model: ModelConfig,
    worker: WorkerConfig,
    on_progress: Callable[[], None],
    drafter: "FoundDrafter | None",
) -> tuple[Decoder, PoolSize, bool]:
    """Returns a decoder, the sizes of the pools, and whether bits are batch-invariant. For a model in one process."""
    formats, gpu, invariant = loaded.files.formats, loaded.gpu, worker.batch_invariant
    size, decoder = size_pool_and_decoder(
        loaded.files.spec, loaded.weights, formats.kv_dtype, model, worker, gpu, on_progress, drafter=drafter
    )
    if gpu is not None:  # this check must run before the cache takes the memory
        from worker.model_runner.check_bits import keeps_bits

        invariant = keeps_bits(decoder, worker, size.max_seq_len, gpu.name)
    return decoder, size, invariant


def _fit_ranks(
    loaded: LoadedModel, model: ModelConfig, worker: WorkerConfig, on_progress: Callable[[], None]
) -> tuple[Decoder, PoolSize, bool]:
    """Returns what _fit() does, for rank 0 of several. The sizes are those of the pools of the whole model."""
    if loaded.gpu is not None:
        from worker.engine.ranks_on_gpu import fit

        found = fit(loaded, model, worker, on_progress)
        warn_if_capped(found[1], worker)
        return found
    assert loaded.ranks is not None
    own, budget = loaded.weights.embed, configured_budget(worker, loaded.ranks.free(on_progress))
    kv_dtype = loaded.files.formats.kv_dtype
    size = size_pool(loaded.files.spec, kv_dtype, own.device, budget, model, worker, own.dtype)
    warn_if_capped(size, worker)
    return Decoder(loaded.part, loaded.weights, size.max_seq_len), size, worker.batch_invariant


def _runner_for(
    decoder: Decoder,
    cache: KVCache,
    loaded: LoadedModel,
    worker: WorkerConfig,
    size: PoolSize,
    vision: "Vision | None",
    on_progress: Callable[[], None],
) -> Runner:
    """Returns a runner, on the CPU with prepared memory. Its graphs are not captured yet."""
    formats, gpu = loaded.files.formats, loaded.gpu
    log.info(
        "%s on %s in %s, K/V in %s: %s", decoder.spec.model_type, gpu.name if gpu else "cpu", formats.dtype,
        formats.kv_name, size,
    )  # fmt: skip
    if gpu is None:
        warn_about_cpu(worker, formats)
        _prepare_cpu_memory(cache)
    if loaded.ranks is None:
        runner = make_runner(fastest_decoder(decoder, cache), cache, worker, vision, on_gpu=gpu is not None)
    else:
        shared = loaded.ranks.model(decoder, cache, size, on_progress)
        runner = make_runner(shared, cache, worker, vision, on_gpu=gpu is not None)
        runner.pipeline = shared.pipeline
    return runner


def _count_loads(decoder: Decoder, loaded: LoadedModel) -> Tensor:
    return decoder.count_loads() if loaded.ranks is None else loaded.ranks.count_loads(decoder)


def _counting(loads: Tensor, spec: ModelSpec) -> Callable[[], ExpertLoads]:
    """Sets the counts of expert loads to zero. Returns a function that reads the counts of each layer with experts."""
    loads.zero_()
    sparse = [index for index, layer in enumerate(spec.layers) if layer.sparse]
    return lambda: dict(zip(sparse, loads[sparse].tolist(), strict=True))


def _settings_on(device: torch.device, worker: WorkerConfig) -> WorkerConfig:
    """Returns the settings with the sizes and switches that fit the device.

    Ranks on GPUs do without what was never tried together with their exchanges: CUDA graphs, options that let kernels
    run ahead of others, and steps that read the ids of the last step on the device.
    """
    on_gpu = device.type == "cuda"
    worker = replace(worker, overlap=worker.overlap and on_gpu)
    if on_gpu and worker.ranks > 1:
        log.info("several GPUs compute the model: steps run without CUDA graphs, --overlap and --gpu-options")
        worker = replace(worker, overlap=False, cuda_graphs=False, gpu_options="")
    return with_default_sizes(worker, on_gpu=on_gpu)


def _resolve_speculation(worker: WorkerConfig, folder: Path, formats: Formats, device: torch.device) -> WorkerConfig:
    """Replaces --speculation auto by ngram where drafts make decoding faster, and by off elsewhere.

    Speculation is off on a GPU, because steps with drafts cannot overlap there, and their speed was not measured yet.
    It is off without C kernels, because only they give a row the same bits in any step. It is off for models that fit
    in the processors' caches, because their steps are not memory-bound. It is off where bits depend on the rest of a
    step.
    """
    if not worker.batch_invariant:
        if worker.speculation == "ngram":
            log.warning("--speculation ngram has no effect: drafts could change answers on this device")
        return replace(worker, speculation="off")
    if worker.speculation != "auto":
        return worker
    pays = device.type == "cpu" and formats.all_in_c and stored_bytes(folder) > PROCESSOR_CACHE_BYTES
    return replace(worker, speculation="ngram" if pays else "off")


def _prepare_cpu_memory(cache: KVCache) -> None:
    """Requests huge pages for the K/V cache from the system, and starts to prefault its memory ahead of use."""
    for part in (*cache.k, *cache.v):
        huge_pages(part)
    cache.prefault_ahead(c_library.touch_pages)


def _with_whole_images(worker: WorkerConfig, tower: "Tower | None") -> WorkerConfig:
    """Returns the settings, enlarged so that a step can hold an image that must not be cut, besides all decodes."""
    if tower is None or tower.spec is None or not (tokens := tower.spec.largest_whole):
        return worker
    return replace(
        worker,
        prefill_chunk_size=max(worker.prefill_chunk_size, tokens),
        max_step_tokens=max(worker.max_step_tokens, tokens + worker.max_batch_size),
    )


def _vision(tower: "Tower | None", decoder: Decoder, worker: WorkerConfig) -> "Vision | None":
    """Returns the encoder of images; None if images are not served."""
    if tower is None or tower.spec is None or tower.weights is None:
        return None
    from worker.vision.vision import Vision

    cache_bytes = int(worker.encoder_cache_gb * GIB)
    width = decoder.ropes[0][0].shape[1]
    return Vision(tower.spec, tower.weights, decoder.operations, decoder.layers_started, cache_bytes, width)


def make_runner(
    model: Model, cache: KVCache, worker: WorkerConfig, vision: "Vision | None" = None, *, on_gpu: bool
) -> Runner:
    capturable = model.operations is not TORCH  # no graph can capture plain torch, which waits for the device
    return Runner(
        model,
        cache,
        max_batch_size=worker.max_batch_size,
        overlap=worker.overlap,
        graphs=worker.cuda_graphs and on_gpu and capturable,
        max_step_tokens=worker.max_step_tokens,
        max_loras=worker.max_loras,
        batch_invariant=worker.batch_invariant,
        vision=vision,
    )


def size_pool_and_decoder(
    spec: ModelSpec,
    weights: Weights,
    kv_dtype: torch.dtype,
    model: ModelConfig,
    worker: WorkerConfig,
    gpu: GpuMemoryReader | None,
    on_progress: Callable[[], None],
    drafter: "FoundDrafter | None" = None,
) -> tuple[PoolSize, Decoder]:
    """Returns the sizes of the K/V pools, and a decoder for the longest sequences that the pools can hold.

    drafter: takes a part of a GPU's memory.

    On a GPU, the kernels are chosen and compiled first, and the memory that they leave for the pool is measured.
    """
    device = weights.embed.device
    if gpu is None:
        size = size_pool(spec, kv_dtype, device, configured_budget(worker), model, worker, weights.embed.dtype)
        warn_if_capped(size, worker)
        return size, Decoder(spec, weights, size.max_seq_len)
    from worker.model_runner.check_bits import checked_on_gpu

    log.info("preparing kernels for %s", gpu.name)
    length = longest_sequence(spec, model, worker)
    decoder, measured = checked_on_gpu(Decoder(spec, weights, length), worker, length, gpu, on_progress)
    measured = measured if drafter is None else drafter.leaves(measured)
    budget = configured_budget(worker) if worker.kv_cache_gb else measured
    size = size_pool(spec, kv_dtype, device, budget, model, worker, weights.embed.dtype)
    warn_if_capped(size, worker)
    return size, decoder


def warn_if_capped(size: PoolSize, worker: WorkerConfig) -> None:
    """Logs a warning if the pool is smaller than --kv-cache-gb because running sequences could not use more."""
    if size.nbytes < (1 - CAPPED_SHARE) * worker.kv_cache_gb * GIB:
        log.warning(
            "--kv-cache-gb %g is capped to %.3g: %d sequences (--max-batch-size) of %d tokens need no more",
            worker.kv_cache_gb, size.nbytes / GIB, worker.max_batch_size, size.max_seq_len,
        )  # fmt: skip
