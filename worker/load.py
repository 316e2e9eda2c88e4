"""From a model's name to a runner: checkpoint, weights, K/V pool, scheduler; each part reports how far it is."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.config import ConfigError, ModelConfig, WorkerConfig
from shared.messages import Limits
from worker.grammar.compiler import Compiler
from worker.kernels import native
from worker.memory.budget import size_pool
from worker.memory.cache import Cache
from worker.memory.pages import PagePool
from worker.model.checkpoint import CheckpointError, read_config, resolve
from worker.model.decoder import Decoder
from worker.model.families import spec_from_config
from worker.model.spec import ModelSpec
from worker.model.weights import load
from worker.run.runner import Runner
from worker.schedule.policy import SchedulerConfig
from worker.schedule.scheduler import Scheduler

log = logging.getLogger("sluice.load")


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model, ready to step."""

    runner: Runner
    scheduler: Scheduler
    pool: PagePool
    spec: ModelSpec
    limits: Limits
    tokenizer_hash: str
    compiler: Compiler
    device: str
    dtype: str


def load_engine(
    model: ModelConfig, worker: WorkerConfig, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Engine:
    """Raises ConfigError (flags that do not fit the model or the machine) or CheckpointError, in one sentence."""
    device = pick_device(worker.device)
    folder = resolve(model.model)
    spec, tokenizer_hash = spec_from_config(read_config(folder)), _hash(folder)
    dtype = getattr(torch, spec.dtype if worker.dtype == "auto" else worker.dtype)
    compiler = Compiler(folder, spec.vocab_size, spec.eos_ids)
    weights = load(folder, spec, dtype, device, invariant=worker.batch_invariant, on_progress=on_progress)
    size = size_pool(spec, dtype, device, model, worker)
    log.info(
        "%s on %s in %s: %d pages of %d tokens, sequences up to %d",
        spec.model_type, device, dtype, size.pages - 1, size.page_size, size.max_seq_len,
    )  # fmt: skip
    if device.type == "cpu" and worker.batch_invariant and not native.available(dtype):
        log.warning("--batch-invariant: no C kernels for %s here, so bits may depend on who shares a step", dtype)
    decoder = Decoder(spec, weights, size.max_seq_len)
    cache = Cache(spec, size.pages, size.page_size, dtype, device)
    if device.type == "cpu":
        for part in (cache.k, cache.v):
            native.huge(part)
        cache.populate_ahead(native.touch)
    pool = PagePool(size.pages, size.page_size)
    return Engine(
        runner=Runner(decoder, cache, overlap=worker.overlap and device.type == "cuda"),
        scheduler=Scheduler(SchedulerConfig.of(worker, size.max_seq_len, frozenset(spec.eos_ids)), pool),
        pool=pool,
        spec=spec,
        limits=Limits(size.max_seq_len, spec.vocab_size, spec.eos_ids),
        tokenizer_hash=tokenizer_hash,
        compiler=compiler,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
    )


def pick_device(name: str) -> torch.device:
    """Raises ConfigError when `cuda` is asked for and cannot be had."""
    if name == "cuda" and not torch.cuda.is_available():
        why = "this PyTorch was built without CUDA" if torch.version.cuda is None else "no CUDA device was found"
        raise ConfigError(f"--device cuda: {why}")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _hash(folder: Path) -> str:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise CheckpointError(f"{folder}: tokenizer.json is missing")
    return hashlib.sha256(file.read_bytes()).hexdigest()
