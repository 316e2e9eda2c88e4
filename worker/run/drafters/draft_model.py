"""Finds the draft model of --speculative-config, checks that it fits the served model, and limits its memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from shared.config import ModelConfig, WorkerConfig
from shared.config.speculation import FLAG, read_speculative_config
from worker.kv_cache.sizing import configured_budget
from worker.model.checkpoint.checkpoint import CheckpointError, resolve
from worker.run.drafters.vocabulary import same_vocabulary
from worker.spec import ModelSpec

POOL_SHARE = 8  # a drafter's K/V takes at most 1 / POOL_SHARE of the served model's K/V budget, in addition to it


def draft_settings(model: ModelConfig, worker: WorkerConfig) -> tuple[ModelConfig, WorkerConfig]:
    """Returns the settings to load the draft model with. One process has it whole, also if several serve the model."""
    config = read_speculative_config(worker.speculative_config, worker.max_draft_tokens)
    alone = replace(worker, tensor_parallel_size=1, pipeline_parallel_size=1, rank_group="local")
    return (
        replace(model, model=config.model, mmproj="off", revision="", max_seq_len=0, task="generate"),
        replace(alone, kv_cache_gb=0.0, kv_cache_dtype="auto"),
    )


def draft_folder(worker: WorkerConfig) -> Path:
    """Returns the folder of the draft model's checkpoint; downloads it if necessary. Raises CheckpointError."""
    return resolve(read_speculative_config(worker.speculative_config, worker.max_draft_tokens).model)


@contextmanager
def explain_draft_model() -> Iterator[None]:
    """Makes every CheckpointError say that it is about the draft model."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"the draft model ({FLAG}) cannot be used: {error}") from error


def check_fits(draft: ModelSpec, draft_folder: Path, served: ModelSpec, served_folder: Path) -> None:
    """Raises CheckpointError unless each token id stands for the same token in both models."""
    if draft.vocab_size != served.vocab_size:
        raise CheckpointError(
            f"{draft_folder} has a vocabulary of {draft.vocab_size} tokens, and the served model one of "
            f"{served.vocab_size}"
        )
    if not same_vocabulary(draft_folder, served_folder):
        raise CheckpointError(f"{draft_folder} has other tokens than the served model under some ids")


def drafters_budget(worker: WorkerConfig) -> int:
    """Returns how many bytes the K/V of a drafter may take. worker: the settings of the served model."""
    return configured_budget(worker).nbytes // POOL_SHARE
