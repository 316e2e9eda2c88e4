"""Ranks in threads of one process, which share one device: the bits of one process with the same kernels.

On a machine with a GPU, its kernels compute: one GPU is enough, as these ranks exchange columns in its memory.
"""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import Checkpoints
from tests.patience import PATIENCE_S
from tests.worker.distributed.rank import OPERATIONS
from tests.worker.distributed.threads import together
from tests.worker.models.harness import SLOTS, advance, pack, prompts_of, rows_for
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.checkpoint.checkpoint import read_config
from worker.distributed.messages import HIDDEN, inputs_of, order
from worker.distributed.nccl import GatheringDecoder, side_by_side
from worker.kv_cache.tensors import KVCache
from worker.models.config import spec_from_config
from worker.models.decoder import Decoder
from worker.models.forward_inputs import ForwardInputs
from worker.models.load import load
from worker.models.sharding import Share
from worker.operations import FAST
from worker.quantization.methods import in_memory

RANKS = 2
LENGTHS, CHUNKS = [1, 5, 300, 70], [65, 1, 700]  # prompts; decodes beside chunks; the rest of the prompts
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KINDS = (
    ("llama", "auto"), ("llama-biased", "int4"), ("llama", "fp8"), ("qwen3", "int8"), ("gemma3", "auto"),
    ("gpt-oss", "auto"), ("qwen2-moe", "int4"), ("gemma4-moe", "auto"), ("qwen3_5", "auto"), ("lfm2-moe", "auto"),
)  # fmt: skip


class Meeting:
    """The shards of ranks in threads."""

    count = RANKS

    def __init__(self, rank: int, given: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank, self._given, self._barrier = rank, given, barrier

    def gather(self, own: Tensor) -> Tensor:
        self._given[self.rank] = own
        self._barrier.wait()
        whole = side_by_side(torch.stack(self._given))
        self._barrier.wait()
        return whole

    def settle(self) -> None:
        pass


def decoder_for(folder: Path, quantization: str, device: torch.device, share: Share | None) -> tuple[Decoder, KVCache]:
    spec = spec_from_config(read_config(folder))
    memory = in_memory(spec.stored, quantization, device)
    weights = load(folder, spec, torch.bfloat16, device, invariant=True, memory=memory, share=share)
    operations = FAST if device.type == "cuda" else OPERATIONS
    decoder = Decoder(spec if share is None else share.spec(spec), weights, 512, operations)
    cache = KVCache(decoder.spec, (64,), 16, torch.bfloat16, device, state_slots=SLOTS, state_dtype=torch.bfloat16)
    return decoder, cache


def steps(cache: KVCache, like: Tensor) -> Iterator[ForwardInputs]:
    rows = rows_for(cache, prompts_of(LENGTHS), 0)
    for chunk in CHUNKS:
        chunks = advance(rows, chunk)
        yield inputs_of(order(HIDDEN, pack(chunks, cache.page_size)), like)
        for row, length in chunks:
            row.advance(length)


def computed(part: GatheringDecoder, inputs: ForwardInputs) -> Tensor:
    with torch.inference_mode():
        return part.logits(part.hidden(inputs, checked=True))


def compare(folder: Path, quantization: str, device: torch.device) -> None:
    whole, cache = decoder_for(folder, quantization, device, None)
    given, barrier = [torch.empty(0)] * RANKS, threading.Barrier(RANKS, timeout=PATIENCE_S)
    parts = []
    for rank in range(RANKS):
        shards: Any = Meeting(rank, given, barrier)
        parts.append(GatheringDecoder(*decoder_for(folder, quantization, device, Share(rank, RANKS)), shards))
    for number, inputs in enumerate(steps(cache, whole.weights.embed.like)):
        with torch.inference_mode():
            expected = whole.forward(inputs, cache)
        for logits in together([partial(computed, part, inputs) for part in parts]):
            assert torch.equal(logits, expected), number


@needs_library
def test_ranks_in_threads_give_the_bits_of_one_process_on_the_cpu(checkpoints: Checkpoints) -> None:
    compare(checkpoints("qwen2-moe"), "auto", torch.device("cpu"))


@pytest.mark.parametrize(("kind", "quantization"), [pytest.param(*each, marks=ON_GPU) for each in KINDS])
def test_ranks_in_threads_give_the_bits_of_one_process_on_a_gpu(
    checkpoints: Checkpoints, kind: str, quantization: str
) -> None:
    compare(checkpoints(kind), quantization, torch.device("cuda"))
