"""Prepares ranks on GPUs: checks the kernels of each GPU, and sizes the K/V pool by the GPU with the least room.

Each rank checks its GPU alone, with its own weights. Its own columns then stand in for those of other ranks.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from worker.distributed.messages import Free
from worker.distributed.nccl import rehearsing
from worker.engine.load_model import LoadedModel, ModelFiles
from worker.engine.numerics import kernels_name
from worker.kv_cache.sizing import GpuMemoryReader, PoolBudget, PoolSize, configured_budget, longest_sequence, size_pool
from worker.model_runner.check_bits import keeps_bits
from worker.model_runner.check_kernels import choose_operations
from worker.models.decoder import Decoder, Weights
from worker.models.sharding import Part
from worker.operations import Operations
from worker.ops.embedding import plain
from worker.ops.linear.packed import pack_stacked
from worker.spec import ModelSpec

TOKENS = 256  # the vocabulary of checks on a rank that has no embedding
REMEDY = "use more GPUs, raise --gpu-memory-utilization, or lower --max-seq-len, --max-step-tokens or --max-batch-size"


def fit(
    loaded: LoadedModel, model: ModelConfig, worker: WorkerConfig, on_progress: Callable[[], None]
) -> tuple[Decoder, PoolSize, bool]:
    """Returns rank 0's decoder, the sizes of the pools of the whole model, and whether all ranks keep bits.

    Raises ConfigError, RankLost, and what choose_operations() raises.
    """
    files, ranks, gpu, weights = loaded.files, loaded.ranks, loaded.gpu, loaded.weights
    assert ranks is not None and gpu is not None
    ranks.join(on_progress)
    operations, own = measure(ranks.part, files, weights, model, worker, gpu, on_progress)
    agreed = ranks.agree(own, on_progress)
    ranks.sum_weights(weights, on_progress)
    budget = configured_budget(worker) if worker.kv_cache_gb else PoolBudget(agreed.nbytes, REMEDY)
    formats = files.formats
    size = size_pool(files.spec, formats.kv_dtype, files.device, budget, model, worker, formats.dtype)
    return Decoder(loaded.part, weights, size.max_seq_len, operations), size, agreed.invariant


def measure(
    part: Part, files: ModelFiles, weights: Weights, model: ModelConfig, worker: WorkerConfig, gpu: GpuMemoryReader,
    on_progress: Callable[[], None],
) -> tuple[Operations, Free]:  # fmt: skip
    """Returns the operations of a rank, and the memory that they leave for its part of the K/V pool.

    Raises what choose_operations() raises.
    """
    length = longest_sequence(files.spec, model, worker)
    spec, weights = _with_tokens(part, part.spec(files.spec), weights)
    decoder = Decoder(spec, weights, length)
    decoder.exchange = rehearsing(part.tp_size)
    decoder, budget = choose_operations(decoder, worker, length, gpu, on_progress)
    kernels, invariant = kernels_name(decoder, files.formats.dtype), keeps_bits(decoder, worker, length, gpu.name)
    return decoder.operations, Free(budget.nbytes, kernels, invariant)


def _with_tokens(part: Part, spec: ModelSpec, weights: Weights) -> tuple[ModelSpec, Weights]:
    """Returns the spec and weights with a small random embedding and head, where a stage has none."""
    if not part.stage.index:
        return spec, weights
    like, shape = weights.embed, (TOKENS, spec.hidden_size)
    generator = torch.Generator(like.device).manual_seed(0)
    table = torch.randn(shape, generator=generator, device=like.device).to(like.dtype)
    head = pack_stacked([table[: TOKENS // part.tp_size]], dtype=like.dtype, invariant=weights.head.invariant)
    return replace(spec, vocab_size=TOKENS), replace(weights, embed=plain(table), head=head)
