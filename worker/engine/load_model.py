"""Loads a model by its name: its config files, and its weights to a device. It builds no cache and no scheduler."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shared.build import VERSION, commit
from shared.config import ConfigError, ModelConfig, WorkerConfig
from shared.fingerprint import fingerprint_of
from shared.hf_hub import Progress
from shared.task import Task, TaskError, read_task
from worker.engine.fingerprint import numerics_of
from worker.engine.formats import Formats, choose_formats, dtype_name
from worker.engine.load_weights import load_weights
from worker.kernels.cpu.library import wait_for_library
from worker.kv_cache.gpu_memory import GpuMemoryReader
from worker.kv_cache.sizing import longest_sequence
from worker.model.checkpoint.checkpoint import CheckpointError, read_config, resolve, tokenizer_ends, weight_files
from worker.model.checkpoint.content_hash import ContentHashes
from worker.model.decoder import Decoder
from worker.model.families.families import spec_from_config
from worker.model.layer import Weights
from worker.model.parts.share import CannotShare
from worker.model.source import open_source
from worker.model.weights import Loader
from worker.spec import ModelSpec

if TYPE_CHECKING:  # a worker that serves plain requests loads no feature
    from worker.model.parts.part import Part
    from worker.ranks.checks import Stored
    from worker.ranks.hosts.rendezvous import Hosts
    from worker.ranks.leader import Leader
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
        from worker.ranks.checks import Stored

        return Stored(self.folder, self.spec, self.formats.dtype, self.formats.memory, worker.batch_invariant)

    def parts(self, worker: WorkerConfig) -> "tuple[Part, ...]":
        """Returns the part of the model that each process has. Reads no weights. Raises CannotShare."""
        from worker.model.parts.part import parts_of

        return parts_of(self.spec, worker, partial(self._sizes, worker), _layers_for_pictures(self))

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
            "--kv-cache-dtype": str(formats.kv_dtype).removeprefix("torch."),
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
    folder = resolve(
        model.model, model.revision, mmproj=model.mmproj, prefer_cache=prefer_cache, on_progress=on_download
    )  # fmt: skip
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
        from worker.ranks.leader import Elsewhere, Leader

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


def _layers_for_pictures(files: ModelFiles) -> int:
    if not _states_tower(files):
        return 0
    from worker.vision.checkpoint.load import layers_with_vectors

    return layers_with_vectors(files.folder, files.spec.hidden_size)


def _tower_bytes(files: ModelFiles) -> int:
    if not _states_tower(files):
        return 0
    from worker.vision.checkpoint.load import bytes_of_tower

    return bytes_of_tower(files.folder, files.spec.hidden_size, files.formats.dtype)


def _tower(files: ModelFiles, weights: Weights) -> "Tower | None":
    """Loads the vision tower if config.json has one and the model generates text."""
    if not _states_tower(files):
        return None
    from worker.vision.checkpoint.load import tower_of

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
    if not file.exists():
        raise CheckpointError(f"{folder}: tokenizer.json is missing")
    return hashlib.sha256(file.read_bytes()).hexdigest()


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
