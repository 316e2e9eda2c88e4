"""Loads an engine for an encoder: its weights, and a scheduler whose sequences own no K/V.

The scheduler gives a sequence pages before it runs it. An encoder keeps nothing of a text, so its pages are places: a
page is as long as the longest text, there are as many as texts may run together, and there is no memory behind them.
Prompts are never cut.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from shared.build import fingerprint_of
from shared.checkpoint import Task, TaskError, read_task
from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig, with_default_sizes
from shared.gguf.naming import INDEX as GGUF_INDEX
from shared.hf_hub import Progress
from shared.machine import memory
from shared.messages import Limits
from worker.checkpoint.checkpoint import CheckpointError, read_config, weight_files
from worker.checkpoint.content_hash import ContentHashes
from worker.encoder.encoder import Encoder, EncoderRunner
from worker.encoder.families import EncoderSpec, encoder_spec
from worker.encoder.weights import load_encoder
from worker.engine.build import Engine
from worker.engine.numerics import ARITHMETIC_VERSION, Formats, choose_formats, dtype_name, numerics_of
from worker.kv_cache.sizing import PoolSize, check_host_memory
from worker.kv_cache.tensors import CacheGroup
from worker.model_runner.runner import Runner
from worker.ops import native as c_library
from worker.ops.native import wait_for_library
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.structured_output.compiler import GrammarCompiler

log = logging.getLogger("sluice.load")


def load_encoder_engine(
    folder: Path, model: ModelConfig, worker: WorkerConfig, on_progress: Progress = lambda done, total: None
) -> Engine:
    """Loads the encoder in `folder` and builds an engine on the CPU.

    Raises ConfigError when a flag does not fit an encoder, and CheckpointError when it cannot be loaded.
    """
    _check_flags(model, worker)
    worker = with_default_sizes(worker, on_gpu=False)
    try:
        task = read_task(folder, model.task)
    except TaskError as error:
        raise CheckpointError(str(error)) from error
    spec = encoder_spec(read_config(folder), task)
    longest = _longest(spec, task, model)
    formats = choose_formats(spec.model, worker, torch.device("cpu"))
    hashes = ContentHashes([*weight_files(folder), *_dense_files(folder, spec)], worker.weights_cache)
    wait_for_library(partial(on_progress, 0, 1))
    weights = load_encoder(
        folder, spec, formats.dtype, memory=formats.memory, on_progress=on_progress,
        on_size=lambda size: check_host_memory(size, 0, memory()),
    )  # fmt: skip
    on_progress(1, 1)
    log.info("%s, an encoder, on cpu in %s: texts of up to %d tokens", spec.model.model_type, formats.dtype, longest)
    encoder = Encoder(spec, weights, longest)
    return _engine(folder, task, encoder, formats, worker, partial(hashes.wait, partial(on_progress, 1, 1)))


def _engine(
    folder: Path, task: Task, encoder: Encoder, formats: Formats, worker: WorkerConfig, hashes: Callable[[], list[str]]
) -> Engine:
    spec, longest = encoder.spec, encoder.most_tokens
    size = PoolSize(
        (worker.max_batch_size + 1,), longest, longest, (CacheGroup(0, tuple(range(len(spec.reaches)))),), (0,)
    )
    whole = replace(worker, use_chunked_prefill=False, prefix_cache=False, speculation="off", overlap=False)
    pools = size.pools()
    kernels = "c" if c_library.available(formats.dtype) else "torch"
    numerics = numerics_of(kernels, formats, torch.device("cpu"), batch_invariant=kernels == "c")
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        raise CheckpointError(f"{folder}: tokenizer.json is missing")
    tokenizer_hash = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    facts: list[Any] = [ARITHMETIC_VERSION, hashes(), tokenizer_hash, spec, numerics]
    return Engine(
        runner=cast(Runner, EncoderRunner(encoder)),  # the compute loop needs a StepRunner only
        scheduler=Scheduler(SchedulerConfig.of(whole, longest, frozenset()), pools),
        pools=pools,
        size=size,
        spec=spec.model,
        limits=Limits(
            longest, spec.model.vocab_size, (), spec.vector_size,
            worker.max_batch_size + worker.max_waiting_requests, worker.max_batch_size,
        ),
        tokenizer_hash=tokenizer_hash,
        compiler=GrammarCompiler(folder, spec.model.vocab_size, ()),
        device="cpu",
        dtype=dtype_name(formats.dtype, formats.memory),
        kernels=kernels,
        batch_invariant=numerics.batch_invariant,
        fingerprint=fingerprint_of(facts),
        task=task,
        folder=folder,
    )  # fmt: skip


def _check_flags(model: ModelConfig, worker: WorkerConfig) -> None:
    """Raises ConfigError, which names the flag, for what is not served with an encoder."""
    refused = {
        "--tensor-parallel-size and --pipeline-parallel-size": worker.ranks > 1,
        f"--device {worker.device}": worker.device not in ("auto", "cpu"),
        "--lora-modules": bool(model.lora_modules),
        "--speculative-config": bool(worker.speculative_config),
    }
    for flag, given in refused.items():
        if given:
            raise ConfigError(f"{flag}: not supported with an encoder, which computes in one process on the CPU")


def _longest(spec: EncoderSpec, task: Task, model: ModelConfig) -> int:
    """Returns the longest text in tokens. Raises ConfigError when --max-seq-len is more than the encoder has."""
    most = min(spec.most_tokens, task.most_tokens or spec.most_tokens)
    if model.max_seq_len > spec.most_tokens:
        raise ConfigError(f"--max-seq-len {model.max_seq_len} is more than the model's {spec.most_tokens}")
    return model.max_seq_len or most


def _dense_files(folder: Path, spec: EncoderSpec) -> list[Path]:
    """Returns the files of linears after pooling; none for a GGUF file, which has them in the file of the layers."""
    if (folder / GGUF_INDEX).exists():
        return []
    return [file for one in spec.dense if one.folder for file in weight_files(folder / one.folder)]
