"""Finds the draft model, and adds it to an engine once the served model is loaded.

--speculative-config names the draft model. With --speculation auto, it is the checkpoint's MTP head, if there is one.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig, read_speculative_config
from shared.config.worker import WorkerConfig
from shared.hf_hub import Progress
from worker.checkpoint.checkpoint import CheckpointError
from worker.checkpoint.staging import Staging
from worker.engine.load_model import LoadedModel, ModelFiles, find_model, load_model
from worker.kv_cache.sizing import PoolBudget, PoolSize, longest_sequence
from worker.model_runner.runner import Runner
from worker.models.decoder import Decoder, Weights
from worker.models.load import Loader, open_source
from worker.operations import TORCH
from worker.ops.linear.packed import PackedLinear
from worker.quantization.methods import in_memory
from worker.scheduler.drafts import Proposer
from worker.spec import ModelSpec

if TYPE_CHECKING:
    from worker.distributed.rendezvous import Hosts
    from worker.spec_decode.head_drafter import Head

log = logging.getLogger("sluice.load")


@dataclass(frozen=True, slots=True)
class FoundDrafter:
    """A draft model that was found but not loaded yet.

    nbytes: the memory that it takes. optional: whether the model is served without it if the memory is too small.
    kv_bytes: returns how much of a number of bytes its K/V takes on a GPU, where `nbytes` may not include the K/V.
    load: loads it. Returns what proposes drafts, and adds it to the runner if it reads hidden states. Raises
    CheckpointError.
    """

    nbytes: int
    kv_bytes: Callable[[int], int]
    load: "Callable[[Served], Proposer]"
    optional: bool = False

    def load_for(self, runner: Runner, weights: Weights, size: PoolSize, worker: WorkerConfig) -> Proposer:
        """Loads it for a served model with these weights and K/V pools. The runner's graphs are not captured yet."""
        return self.load(Served(runner, weights, size, worker))

    def leaves(self, budget: PoolBudget) -> PoolBudget:
        """Returns what the drafter leaves of a GPU's memory for the served model's K/V. Its weights are not loaded."""
        from worker.spec_decode.model_drafter import POOL_SHARE

        left = max(0, budget.nbytes - self.nbytes)
        return replace(budget, nbytes=max(0, left - self.kv_bytes(left // (POOL_SHARE + 1))))


@dataclass(frozen=True, slots=True)
class Served:
    """The model that a drafter drafts for: its runner, before graphs are captured, its weights, and its K/V pools."""

    runner: Runner
    weights: Weights
    size: PoolSize
    worker: WorkerConfig

    @property
    def on_gpu(self) -> bool:
        return self.weights.embed.is_cuda

    @property
    def drafters_budget(self) -> int:
        """How many bytes the K/V of a drafter may take."""
        from worker.spec_decode.model_drafter import POOL_SHARE, drafters_budget

        return self.size.nbytes // POOL_SHARE if self.on_gpu else drafters_budget(self.worker)

    @property
    def how(self) -> dict[str, bool]:
        """How the drafter's model computes its steps: see DraftRunner."""
        return {"ahead": self.on_gpu, "graphs": bool(self.runner.graph_tokens)}

    def operations_of(self, decoder: Decoder) -> Decoder:
        """Returns a drafter's decoder. It uses plain PyTorch if the served model does, as kernels are wrong there."""
        return decoder.with_operations(TORCH) if self.runner.operations is TORCH else decoder


def load_with_drafter(
    files: ModelFiles, model: ModelConfig, worker: WorkerConfig, on_progress: Progress, hosts: "Hosts | None" = None
) -> tuple[LoadedModel, FoundDrafter | None]:
    """Loads the model, and returns it with its draft model, if there is one and both fit in the memory.

    hosts: the rendezvous of the processes of --rank-group. Raises the same errors as load_model and find_drafter.
    """
    drafter = find_drafter(files, model, worker)
    try:
        return load_model(files, model, worker, on_progress, drafter.nbytes if drafter else 0, hosts), drafter
    except ConfigError as error:
        if drafter is None or not drafter.optional:
            raise
        loaded = load_model(files, model, worker, on_progress, 0, hosts)
        log.warning("the checkpoint's MTP head proposes no drafts: %s", error)
        return loaded, None


def find_drafter(files: ModelFiles, model: ModelConfig, worker: WorkerConfig) -> FoundDrafter | None:
    """Returns the draft model; None if there is none. Raises ConfigError and CheckpointError."""
    if not worker.speculative_config:
        return _find_own_head(files, model, worker) if worker.speculation == "auto" else None
    config = read_speculative_config(worker.speculative_config, worker.max_draft_tokens)
    if not config.runs_a_model:
        return None
    if files.device.type != "cpu" and worker.ranks > 1:
        raise ConfigError(
            f"--speculative-config with {config.method} works on one GPU or on CPUs, and not with {worker.ranks_flag} "
            "above 1 on GPUs; leave one of both out"
        )
    return FINDERS[config.method](files, model, worker)


def _find_own_head(files: ModelFiles, model: ModelConfig, worker: WorkerConfig) -> FoundDrafter | None:
    """Returns the checkpoint's MTP head if there is one and --speculation auto can use it here; else None."""
    from worker.spec_decode.mtp import has_head

    usable = files.device.type == "cpu" and files.formats.all_in_c and worker.batch_invariant
    usable = usable and files.task.name == "generate" and worker.ranks == 1
    if not usable or not has_head(files.folder, files.spec):
        return None
    try:
        return replace(_find_mtp(files, model, worker), optional=True)
    except CheckpointError as error:
        log.warning("the checkpoint's MTP head cannot be used, and proposes no drafts: %s", error)
        return None


def _find_mtp(files: ModelFiles, model: ModelConfig, worker: WorkerConfig) -> FoundDrafter:
    from worker.spec_decode.mtp import check_head, load_head

    output_head = _bytes_of_head(files, worker)
    formats = files.formats
    spec, nbytes = check_head(files.folder, files.spec, formats.dtype, formats.memory, output_head, files.device)

    def load(served: Served) -> Proposer:
        whole = _whole_head(files, worker)
        longest = served.size.max_seq_len
        return _reading(load_head(files.folder, files.spec, served.weights, formats.memory, longest, whole), served)

    return FoundDrafter(*_memory(nbytes, spec, files, model, worker), load)


def _find_eagle(files: ModelFiles, model: ModelConfig, worker: WorkerConfig) -> FoundDrafter:
    from worker.spec_decode.eagle import check_eagle, load_eagle, read_eagle_config
    from worker.spec_decode.model_drafter import draft_folder, explain_draft_model

    with explain_draft_model():
        folder = draft_folder(worker)
        config = read_eagle_config(folder, files.spec)
        memory = in_memory(config.spec.stored, worker.quantization, files.device)
        output_head = _bytes_of_head(files, worker)
        nbytes = check_eagle(folder, config, files.spec, files.formats.dtype, memory, output_head, files.device)

    def load(served: Served) -> Proposer:
        with explain_draft_model():
            whole = _whole_head(files, worker)
            head = load_eagle(folder, config, files.spec, served.weights, memory, served.size.max_seq_len, whole)
        return _reading(head, served)

    return FoundDrafter(*_memory(nbytes, config.spec, files, model, worker), load)


def _reading(head: "Head", served: Served) -> Proposer:
    """Returns the drafter of a head, which reads hidden states from now on."""
    from worker.spec_decode.head_drafter import HeadDrafter

    head = head.with_decoder(served.operations_of(head.decoder))
    runner = served.runner
    drafter = HeadDrafter(
        head, runner.spec, served.drafters_budget, captured_tokens=runner.graph_tokens, **served.how
    )  # fmt: skip
    runner.hidden_reader = drafter
    return drafter


def _find_draft_model(files: ModelFiles, model: ModelConfig, worker: WorkerConfig) -> FoundDrafter:
    from worker.spec_decode.model_drafter import (
        ModelDrafter,
        check_fits,
        draft_settings,
        explain_draft_model,
    )

    settings = draft_settings(model, worker)
    with explain_draft_model():
        draft = find_model(*settings, files.device)
        check_fits(draft.spec, draft.folder, files.spec, files.folder)
        nbytes = _weights_bytes(draft)

    def load(served: Served) -> Proposer:
        with explain_draft_model():
            decoder = load_model(draft, *settings, lambda done, total: None).decoder(draft.spec.max_positions)
        decoder = served.operations_of(decoder)
        return ModelDrafter(decoder, served.size.max_seq_len, served.drafters_budget, **served.how)

    return FoundDrafter(*_memory(nbytes, draft.spec, files, model, worker), load)


def _weights_bytes(files: ModelFiles) -> int:
    with _loader(files) as loader:
        return loader.nbytes()


def _bytes_of_head(files: ModelFiles, worker: WorkerConfig) -> int:
    """Returns the bytes of a whole output head for drafts; 0 if this process has the served model's whole head."""
    if worker.tensor_parallel_size == 1:
        return 0
    with _loader(files) as loader:
        return loader.bytes_of_head()


def _whole_head(files: ModelFiles, worker: WorkerConfig) -> Callable[[], PackedLinear] | None:
    """Returns a function that loads the served model's output head; None if this process has the whole head."""
    if worker.tensor_parallel_size == 1:
        return None

    def load() -> PackedLinear:
        with _loader(files) as loader:
            return loader.whole_head()

    return load


@contextmanager
def _loader(files: ModelFiles) -> Iterator[Loader]:
    formats = files.formats
    with closing(open_source(files.folder, Staging(files.device))) as source:
        yield Loader(source, files.spec, formats.dtype, files.device, True, formats.memory)


def _memory(
    weights: int, spec: ModelSpec, files: ModelFiles, model: ModelConfig, worker: WorkerConfig
) -> tuple[int, Callable[[int], int]]:
    """Returns the values of FoundDrafter.nbytes and kv_bytes. weights: the bytes of a drafter's weights.

    Without --kv-cache-gb, the K/V takes leftover memory, and is not counted beforehand.
    """
    from worker.spec_decode.model_drafter import cache_bytes, drafters_budget

    longest = longest_sequence(files.spec, model, worker)

    def kv_bytes(room: int) -> int:
        return cache_bytes(spec, files.formats.dtype, longest, room, files.device)

    return weights + (kv_bytes(drafters_budget(worker)) if worker.kv_cache_gb else 0), kv_bytes


FINDERS = {"mtp": _find_mtp, "eagle3": _find_eagle, "draft_model": _find_draft_model}  # keys: `method`
