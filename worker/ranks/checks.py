"""Checks that all ranks have the same numbers: their residual stream after a step, and at start their weights.

Ranks compute norms, sums and embeddings of all rows each for itself, so a processor or memory that errs shows as a
residual stream that differs. A rank's slices of the weights are nobody else's. So at start the rank before it reads
them from the checkpoint, too, and both compare checksums. Checksums are CRC-32: they find errors, not attacks.
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

from worker.kernels.cpu.ranks_c import RankLost
from worker.model.checkpoint.staging import Staging
from worker.model.layer import Layer, Weights
from worker.model.parts.share import Share
from worker.model.parts.stages import Stage
from worker.model.quantization.in_memory import InMemory
from worker.model.source import open_source
from worker.model.weights import Loader
from worker.spec import ModelSpec

Checksums = Mapping[str, int]  # of each slice of the weights, by the path to it in Weights


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint, and how its weights are kept in memory; see load() of worker/model/weights.py."""

    folder: Path
    spec: ModelSpec
    dtype: torch.dtype
    memory: InMemory
    invariant: bool


class RankDiffers(RankLost):
    """A rank has other numbers than it must have. No step is right any more."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


def checksum(tensor: Tensor, before: int = 0) -> int:
    """Returns the CRC-32 of the bytes of a tensor, behind those whose checksum is `before`."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(data.numpy().data, before)


def differing(sums: Sequence[int]) -> int | None:
    """Returns the first rank whose checksum is not the most frequent one; None if all are equal.

    If there are two ranks, rank 1 is named, as nobody can know which one errs.
    """
    usual = max(sums, key=sums.count)  # the first of those that are as frequent
    return next((rank for rank, one in enumerate(sums) if one != usual), None)


def checksums(weights: Weights, first: int = 0) -> dict[str, int]:
    """Returns the checksums of all slices of a rank. first: the number of its first layer."""
    layers = (_of_parts(f"layers.{first + i}", layer) for i, layer in enumerate(weights.layers))
    return dict(chain.from_iterable(layers)) | _beside_layers(weights)


def checksums_from_checkpoint(
    stored: Stored, share: Share | None, on_progress: Callable[[], None], stage: Stage | None = None
) -> dict[str, int]:
    """Reads the slices of a rank from the checkpoint, and returns their checksums. It keeps one layer at a time."""
    found: dict[str, int] = {}
    count = 0 if stage is None else stage.first

    def forget(layer: Layer) -> Layer:
        nonlocal count
        found.update(_of_parts(f"layers.{count}", layer))
        count += 1
        on_progress()
        return cast(Layer, None)

    device = torch.device("cpu")
    with closing(open_source(stored.folder, Staging(device))) as source:
        weights = Loader(
            source, stored.spec, stored.dtype, device, stored.invariant, stored.memory, share=share, stage=stage,
            keep=forget,
        ).load()  # fmt: skip
    return found | _beside_layers(weights)


def check_slices(own: Sequence[Checksums], read_by_last: Sequence[Checksums]) -> None:
    """Raises RankDiffers if a rank has other slices than the rank before it has read from the checkpoint.

    own: of each rank. read_by_last: for each rank, the checksums of its slices that the rank before it has read; rank 0
    is behind the last.

    A rank whose checkpoint differs finds the rank behind it to differ, too; so the first of them is named.
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
    others = {"embed": weights.embed, "norm": weights.norm, "head": weights.head, "inputs": weights.layer_inputs}
    return {path: one for name, value in others.items() for path, one in _of_parts(name, value)}


def _of_parts(path: str, value: Any) -> Iterator[tuple[str, int]]:
    """Yields the checksum of every tensor in a record, with the path to it."""
    if isinstance(value, Tensor):
        yield path, checksum(value)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _of_parts(f"{path}.{field.name}", getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _of_parts(f"{path}.{index}", one)
