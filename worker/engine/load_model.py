"""Loads a model by its name.

Loads a model by its name: its config files, and its weights to a device. It builds no cache and no scheduler.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from shared.build import VERSION, commit, fingerprint_of
from shared.checkpoint import Task, TaskError, read_task
from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.hf_hub import Progress
from shared.machine import memory
from worker.checkpoint.checkpoint import CheckpointError, read_config, resolve, tokenizer_ends, weight_files
from worker.checkpoint.content_hash import ContentHashes
from worker.engine.numerics import Formats, choose_formats, dtype_name, numerics_of
from worker.kv_cache.sizing import (
    GpuMemoryReader,
    WeightsSize,
    check_host_memory,
    check_host_of_several,
    configured_budget,
    longest_sequence,
    size_pool,
)
from worker.models.config import spec_from_config
from worker.models.decoder import Decoder, Weights
from worker.models.load import Loader, load, open_source
from worker.models.sharding import CannotShare, Part
from worker.ops import native as c_library
from worker.ops.native import wait_for_library
from worker.spec import ModelSpec

if TYPE_CHECKING:
    from worker.distributed.checks import Stored
    from worker.distributed.leader import Leader
    from worker.distributed.rendezvous import Hosts
    from worker.vision.vision import Tower


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is read from a model's files other than weights, and the number formats chosen for the device."""

    folder: Path
    task: Task
    tokenizer_hash: str
    spec: ModelSpec
    formats: Formats
    device: torch.device

    def stored(self, worker: WorkerConfig) -> "Stored":
        """Returns the description of the checkpoint from which the ranks read their weights."""
        from worker.distributed.checks import Stored

        return Stored(self.folder, self.spec, self.formats.dtype, self.formats.memory, worker.batch_invariant)

    def parts(self, worker: WorkerConfig) -> "tuple[Part, ...]":
        """Returns the part of the model that each process has. Reads no weights. Raises CannotShare."""
        from worker.models.sharding import parts_of

        return parts_of(self.spec, worker, partial(self._sizes, worker), _layers_for_images(self))

    def _sizes(self, worker: WorkerConfig) -> tuple[list[int], int]:
        """Returns how many bytes each layer takes in memory, and how many rank 0 takes for all that is not a layer."""
        formats = self.formats
        with closing(open_source(self.folder, None)) as source:
            loader = Loader(source, self.spec, formats.dtype, self.device, worker.batch_invariant, formats.memory)
            layers = loader.bytes_of_layers()
            return layers, loader.nbytes() - sum(layers) + _tower_bytes(self)

    def facts(self, worker: WorkerConfig) -> dict[str, str]:
        """Returns the values that must be equal in all processes of --rank-group, keyed by their names in errors."""
        formats = self.formats
        numerics = numerics_of("c", formats, self.device, batch_invariant=worker.batch_invariant)
        sizes = sorted(file.stat().st_size for file in weight_files(self.folder))
        return {
            "the version": " ".join(filter(None, (VERSION, commit()))),
            "--tensor-parallel-size": str(worker.tensor_parallel_size),
            "--pipeline-parallel-size": str(worker.pipeline_parallel_size),
            "the checkpoint": fingerprint_of([self.spec, sizes]),
            "--dtype": dtype_name(formats.dtype, formats.memory),
            "--activations": formats.memory.activations,
            "--kv-cache-dtype": formats.kv_name.removeprefix("torch."),
            "--batch-invariant": "on" if worker.batch_invariant else "off",
            "the instruction sets": numerics.processor,
            **{f"the library {name}": release for name, release in numerics.libraries.items()},
        }


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in the memory of its device.

    gpu: None on the CPU. hashes: the hashes of its weight files. tower: None if config.json has no vision tower.
    """

    files: ModelFiles
    weights: Weights
    gpu: GpuMemoryReader | None
    hashes: ContentHashes
    ranks: "Leader | None" = None  # only if several processes compute the model; `weights` are then rank 0's
    tower: "Tower | None" = None

    @property
    def part(self) -> ModelSpec:
        """The spec of the part of the model that `weights` holds."""
        return self.files.spec if self.ranks is None else self.ranks.part.spec(self.files.spec)

    def decoder(self, max_positions: int) -> Decoder:
        """Makes a decoder for sequences of at most `max_positions` tokens. Its kernels have not been checked yet."""
        return Decoder(self.files.spec, self.weights, max_positions)


def find_model(
    model: ModelConfig,
    worker: WorkerConfig,
    device: torch.device,
    on_download: Progress = lambda done, total: None,
    *,
    prefer_cache: bool = False,
) -> ModelFiles:
    """Finds or downloads the checkpoint, and reads all its files except the weights.

    prefer_cache: use the checkpoint in the cache, even if the hub has a newer one. Raises ConfigError and
    CheckpointError.
    """
    return read_model(find_folder(model, on_download, prefer_cache=prefer_cache), model, worker, device)


def find_folder(
    model: ModelConfig, on_download: Progress = lambda done, total: None, *, prefer_cache: bool = False
) -> Path:
    """Finds or downloads the checkpoint, and returns its folder. Raises CheckpointError."""
    return resolve(
        model.model, model.revision, mmproj=model.mmproj, prefer_cache=prefer_cache, on_progress=on_download
    )  # fmt: skip


def read_model(folder: Path, model: ModelConfig, worker: WorkerConfig, device: torch.device) -> ModelFiles:
    """Reads all files of a checkpoint except the weights. Raises ConfigError and CheckpointError."""
    task, tokenizer_hash = _task(folder, model.task), _tokenizer_hash(folder)
    spec = _spec(folder, task)
    formats = choose_formats(spec, worker, device)
    longest_sequence(spec, model, worker)  # called for its errors: it raises before the weights are read
    return ModelFiles(folder, task, tokenizer_hash, spec, formats, device)


def load_model(
    files: ModelFiles,
    model: ModelConfig,
    worker: WorkerConfig,
    on_progress: Progress,
    drafter: int = 0,
    hosts: "Hosts | None" = None,
) -> LoadedModel:
    """Loads the weights.

    drafter: bytes that a draft model takes in addition
    hosts: the rendezvous of the processes of --rank-group; None without the flag

    Raises CheckpointError, and ConfigError when the memory of the device is too small.
    """
    device = files.device
    gpu = GpuMemoryReader(device, worker.gpu_memory_utilization) if device.type == "cuda" else None
    hashes = ContentHashes(weight_files(files.folder), worker.weights_cache)
    if device.type == "cpu":  # weights are packed by the C library; the hashing threads read the files meanwhile
        wait_for_library(partial(on_progress, 0, 1))
    ranks = None
    if worker.ranks > 1:
        from worker.distributed.leader import Elsewhere, Leader

        elsewhere = None
        if hosts is not None:
            gather = partial(hosts.gather, files.facts(worker), worker, partial(on_progress, 0, 1))
            group = hosts.group
            elsewhere = Elsewhere(gather, partial(content_of, hashes), group.here, (group.leader, group.port))
        ranks = Leader(files.stored(worker), _parts(files, worker), device, model, worker, elsewhere)
    part = None if ranks is None else ranks.part
    with explain_out_of_memory(gpu):
        weights, keep = load_weights(
            files.folder, files.spec, files.formats, device, model, worker, gpu, on_progress, part,
            _tower_bytes(files), drafter, 1 if hosts is None else hosts.group.machines,
        )  # fmt: skip
        if ranks is None:
            keep(lambda done, total: on_progress(1, 1))
        else:
            ranks.keep = keep
        tower = _tower(files, weights)
    return LoadedModel(files, weights, gpu, hashes, ranks, tower)


def _parts(files: ModelFiles, worker: WorkerConfig) -> "tuple[Part, ...]":
    try:
        return files.parts(worker)
    except CannotShare as error:
        raise ConfigError(str(error)) from error


def content_of(hashes: ContentHashes, on_progress: Callable[[], None] = lambda: None) -> str:
    """Returns one hash of all weight files. Raises OSError if a file cannot be read."""
    return fingerprint_of(hashes.wait(on_progress))


def _states_tower(files: ModelFiles) -> bool:
    return files.task.name == "generate" and bool(read_config(files.folder).get("vision_config"))


def _layers_for_images(files: ModelFiles) -> int:
    if not _states_tower(files):
        return 0
    from worker.vision.weights import layers_with_vectors

    return layers_with_vectors(files.folder, files.spec.hidden_size)


def _tower_bytes(files: ModelFiles) -> int:
    if not _states_tower(files):
        return 0
    from worker.vision.weights import bytes_of_tower

    return bytes_of_tower(files.folder, files.spec.hidden_size, files.formats.dtype)


def _tower(files: ModelFiles, weights: Weights) -> "Tower | None":
    """Loads the vision tower if config.json has one and the model generates text."""
    if not _states_tower(files):
        return None
    from worker.vision.weights import tower_of

    return tower_of(files.folder, files.spec.hidden_size, files.formats.dtype, weights.embed.device)


def _task(folder: Path, wanted: str) -> Task:
    try:
        return read_task(folder, wanted)
    except TaskError as error:
        raise CheckpointError(str(error)) from error


def _spec(folder: Path, task: Task) -> ModelSpec:
    spec = spec_from_config(read_config(folder), task)
    return replace(spec, eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *tokenizer_ends(folder)))))


def _tokenizer_hash(folder: Path) -> str:
    file = folder / "tokenizer.json"
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: tokenizer.json is missing") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


@contextmanager
def explain_out_of_memory(gpu: GpuMemoryReader | None) -> Iterator[None]:
    """Turns every error that means "out of memory" into a ConfigError that names the settings to change."""
    try:
        yield
    except (RuntimeError, OSError) as error:  # raised by torch, by the driver through CUDA or Triton, or by the system
        if not any(words in str(error) for words in ("out of memory", "allocate memory")):
            raise
        name = gpu.name if gpu else "the device"
        raise ConfigError(
            f"{name} has no room for this model with these settings ({_first_sentences(error)}): end what else runs "
            "there, or lower --kv-cache-gb, --max-seq-len, --max-step-tokens or --max-batch-size, or serve a smaller "
            "model"
        ) from error


def _first_sentences(error: Exception) -> str:
    """Returns the first two sentences of the message's first line, where PyTorch names the cause."""
    return ". ".join(str(error).split("\n")[0].split(". ")[:2])


# Loads the weights of an engine. First checks that they fit in memory. On the CPU, it uses --weights-cache.

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
    took, resident, peak = time.perf_counter() - begun, *_rss_bytes()
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
    if not worker.weights_cache or not c_library.available(formats.dtype):  # only the C library packs weights
        return read(), _keep_nothing
    from worker.models.weights_cache import WeightsCache

    cache = WeightsCache.of(Path(worker.weights_cache), folder, formats.dtype, formats.memory, part)
    if (found := cache.read(on_progress)) is not None:
        return found, _keep_nothing
    weights = read()
    return weights, partial(cache.write, weights)


def _keep_nothing(on_progress: Progress = lambda done, total: None) -> None:
    pass


def _rss_bytes() -> tuple[int, int]:
    """Returns the resident memory of this process in bytes: the present value and the peak, as Linux reports them."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, most = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return now, most
