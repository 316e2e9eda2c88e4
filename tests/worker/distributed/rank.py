"""A process that is a rank, with gloo in place of NCCL: `python -m tests.worker.distributed.rank JOB`.

It computes the steps of the models that the job names, and writes their logits to a file.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tests.worker.models.harness import CPU, advance, cache_for, pack, prompts_of, rows_for
from worker.checkpoint.checkpoint import read_config
from worker.distributed.nccl import GatheringDecoder, ShardGroup, shard_group_over_tcp
from worker.kv_cache.tensors import KVCache
from worker.models.config import spec_from_config
from worker.models.decoder import Decoder
from worker.models.forward_inputs import ForwardInputs
from worker.models.load import load
from worker.models.sharding import Part, Share
from worker.operations import FAST
from worker.ops.moe.reference import experts_torch
from worker.quantization.methods import in_memory

LENGTHS = [1, 17, 40]
CHUNKS = [33, 1, 33]  # prompts; a decode alone; the end of a prompt
CHECKED = 1  # the step after which ranks compare
# Ranks gather between the products of experts, which the C library cannot do outside its own loop over the layers.
OPERATIONS = replace(FAST, experts=experts_torch)


class Model(msgspec.Struct, frozen=True):
    """quantization: the value of --quantization, for bfloat16"""

    folder: str
    dtype: str
    quantization: str = "auto"


class Job(msgspec.Struct, frozen=True):
    """rank, count: of this process in its group. port: by which the ranks find each other. out: a file for logits"""

    models: list[Model]
    rank: int
    count: int
    port: int
    out: str


def decoder_for(model: Model, share: Share | None) -> tuple[Decoder, KVCache]:
    folder, dtype = Path(model.folder), getattr(torch, model.dtype)
    spec = spec_from_config(read_config(folder))
    memory = in_memory(spec.stored, model.quantization, CPU)
    weights = load(folder, spec, dtype, CPU, invariant=True, memory=memory, share=share)
    decoder = Decoder(spec if share is None else share.spec(spec), weights, 512, OPERATIONS)
    return decoder, cache_for(decoder, tokens=512)


def steps(cache: KVCache) -> Iterator[ForwardInputs]:
    """Yields the steps that every rank computes, and that the whole model computes, with cache pages alike."""
    rows = rows_for(cache, prompts_of(LENGTHS), 0)
    for number, chunk in enumerate(CHUNKS):
        chunks = advance(rows, chunk)
        yield pack(chunks, cache.page_size, all_rows=number == len(CHUNKS) - 1)
        for row, length in chunks:
            row.advance(length)


def whole(model: Model) -> list[Tensor]:
    """Returns the logits of the steps, computed by one process."""
    decoder, cache = decoder_for(model, None)
    with torch.inference_mode():
        return [decoder.forward(inputs, cache) for inputs in steps(cache)]


def shared(model: Model, shards: ShardGroup) -> list[Tensor]:
    decoder, cache = decoder_for(model, Share(shards.rank, shards.count))
    part = GatheringDecoder(decoder, cache, shards)
    with torch.inference_mode():
        return [
            part.logits(part.hidden(inputs, checked=number == CHECKED)) for number, inputs in enumerate(steps(cache))
        ]


def main(job: Job) -> None:
    torch.set_num_threads(1)
    shards = shard_group_over_tcp(Part(job.rank, job.count, (0, 1)), "127.0.0.1", job.port, CPU)
    assert shards is not None
    shards.join()
    torch.save([shared(model, shards) for model in job.models], job.out)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Job))
