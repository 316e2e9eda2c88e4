"""Checks that all ranks have the right numbers: the residual stream after a step, and the weights at start.

Every rank computes the norms, sums and embeddings of all rows, so all ranks have the same residual stream. If it
differs, a processor or memory is faulty. A rank's slices of the weights are on no other rank. At start, the previous
rank therefore also reads these slices from the checkpoint, and the checksums of both are compared. Checksums are
CRC-32: they find errors, not attacks.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from worker.checkpoint.staging import Staging
from worker.models.decoder import Layer, Weights
from worker.models.load import Loader, open_source
from worker.models.sharding import Share, Stage
from worker.models.weights_cache import COUNTER
from worker.ops.exchange import RankLost
from worker.quantization.methods import InMemory
from worker.spec import ModelSpec

CPU = torch.device("cpu")
Checksums = Mapping[str, int]  # path of a slice in Weights → checksum of the slice


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint, and the formats of its weights in memory. For the fields, see load() in worker/models/load.py."""

    folder: Path
    spec: ModelSpec
    dtype: torch.dtype
    memory: InMemory
    invariant: bool


class RankDiffers(RankLost):
    """A rank has wrong numbers, so no step computes right results any more."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


def checksum(tensor: Tensor, before: int = 0) -> int:
    """Returns the CRC-32 of the bytes of a tensor. before: the checksum of bytes before it, to continue from."""
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(data.numpy().data, before)


def differing(sums: Sequence[int]) -> int | None:
    """Returns the first rank whose checksum is not the most frequent one; None if all are equal.

    If there are two ranks, it returns rank 1, because there is no way to know which rank is wrong.
    """
    usual = max(sums, key=sums.count)  # the most frequent checksum; of several, the first
    return next((rank for rank, one in enumerate(sums) if one != usual), None)


def checksums(weights: Weights, first: int = 0) -> dict[str, int]:
    """Returns the checksums of all slices of the weights that a rank has. first: the number of its first layer"""
    layers = (_of_parts(f"layers.{first + i}", layer) for i, layer in enumerate(weights.layers))
    return dict(chain.from_iterable(layers)) | _beside_layers(weights)


def checksums_from_checkpoint(
    stored: Stored, share: Share | None, on_progress: Callable[[], None], stage: Stage | None = None,
    device: torch.device = CPU,
) -> dict[str, int]:  # fmt: skip
    """Reads the slices of a rank from the checkpoint, one layer at a time, and returns their checksums.

    device: where they are read to, which decides how they are packed
    """
    found: dict[str, int] = {}
    count = 0 if stage is None else stage.first

    def forget(layer: Layer) -> Layer:
        nonlocal count
        found.update(_of_parts(f"layers.{count}", layer))
        count += 1
        on_progress()
        return cast(Layer, None)

    with closing(open_source(stored.folder, Staging(device))) as source:
        weights = Loader(
            source, stored.spec, stored.dtype, device, stored.invariant, stored.memory, share=share, stage=stage,
            keep=forget,
        ).load()  # fmt: skip
    return found | _beside_layers(weights)


def check_slices(own: Sequence[Checksums], read_by_last: Sequence[Checksums]) -> None:
    """Raises RankDiffers if a rank has other slices than the previous rank has read from the checkpoint for it.

    own: the checksums of each rank's slices, computed by the rank. read_by_last: the same, read by the previous rank
    (for rank 0, by the last rank).

    If a rank's checkpoint differs, its own check and that of the next rank fail, so the error names the first of both.
    """
    wrong = {rank: _first_difference(*pair) for rank, pair in enumerate(zip(own, read_by_last, strict=True))}
    found = [rank for rank, name in wrong.items() if name]
    named = [rank for rank in found if not wrong[(rank - 1) % len(own)]] or found[1:]
    if named:
        rank = named[0]
        raise RankDiffers(rank, f"has other weights in {wrong[rank]} than rank {(rank - 1) % len(own)} reads there")


def _first_difference(one: Checksums, other: Checksums) -> str:
    return next((name for name in (*one, *other) if one.get(name) != other.get(name)), "")


def _beside_layers(weights: Weights) -> dict[str, int]:
    others = {"embed": weights.embed, "norm": weights.norm, "head": weights.head, "inputs": weights.per_layer_inputs}
    return {path: one for name, value in others.items() for path, one in _of_parts(name, value)}


def _of_parts(path: str, value: Any) -> Iterator[tuple[str, int]]:
    """Yields (path, checksum) for every tensor in a record, without counters."""
    if isinstance(value, Tensor):
        yield path, checksum(value)
    elif is_dataclass(value):
        for field in fields(value):
            if field.name != COUNTER:
                yield from _of_parts(f"{path}.{field.name}", getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _of_parts(f"{path}.{index}", one)
