"""Default step sizes by device: large enough to keep the device busy, small enough that no stream waits long."""

from dataclasses import replace

from shared.config import WorkerConfig

TOKENS, SEQUENCES = 512, 64
GPU_TOKENS, GPU_SEQUENCES = 2048, 256


def with_default_sizes(worker: WorkerConfig, *, on_gpu: bool) -> WorkerConfig:
    """Fills in `max_step_tokens`, `max_batch_size` and `prefill_chunk_size` where unset, to fit the other settings."""
    tokens, sequences = (GPU_TOKENS, GPU_SEQUENCES) if on_gpu else (TOKENS, SEQUENCES)
    chunk = worker.prefill_chunk_size if worker.use_chunked_prefill else 0
    step = worker.max_step_tokens or max(tokens, worker.max_batch_size, chunk)
    return replace(
        worker,
        max_step_tokens=step,
        max_batch_size=worker.max_batch_size or min(sequences, step),
        prefill_chunk_size=worker.prefill_chunk_size or min(tokens, step),
    )
