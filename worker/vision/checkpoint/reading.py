"""Finds and reads single tensors of a tower by the ends of their names, because each layout has its own prefix."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from worker.model.checkpoint.checkpoint import CheckpointError
from worker.model.checkpoint.expected_tensors import check_tensors
from worker.model.checkpoint.stored_weight import PLAIN, PlainWeight, Shape, StoredTensors, StoredWeight, WeightSource

Read = Callable[[str], Tensor]


def before(tensors: StoredTensors, ending: str) -> str | None:
    """Returns the prefix of the tensor whose name has this ending; None if no tensor has it."""
    found = (name.removesuffix(ending) for name in tensors.names() if f".{name}".endswith(f".{ending}"))
    return min(found, key=len, default=None)


@dataclass(frozen=True, slots=True)
class TowerReader:
    """Reads tensors of a checkpoint in `dtype` to a device."""

    source: WeightSource
    dtype: torch.dtype
    device: torch.device

    def found(self, ending: str) -> str:
        """Returns the full name of the tensor with this ending. Raises CheckpointError if there is none."""
        first = before(self.source.tensors, ending)
        if first is None:
            raise CheckpointError(f"{self.source.tensors.folder}: tensor {ending} is missing")
        return first + ending

    def weight(self, name: str, shape: Shape) -> StoredWeight:
        """Returns the stored form of a tensor: plain numbers, or blocks of a GGUF file."""
        few_bits = name in self.source.tensors and self.source.tensors.format(name) not in PLAIN
        return self.source.weight(name, shape) if few_bits and len(shape) == 2 else PlainWeight(name, shape)

    def nbytes(self, shapes: Mapping[str, Shape]) -> int:
        """Returns how many bytes tensors of these shapes take."""
        return sum(map(prod, shapes.values())) * self.dtype.itemsize

    def read(self, shapes: Mapping[str, Shape], prefix: str, unread: tuple[str, ...] = ()) -> Read:
        """Checks the tensors of a tower, and returns a function that reads one by its name.

        shapes: the shapes of all tensors that will be read
        prefix: the prefix of the names of the tower's tensors
        unread: beginnings of the names of tensors that may exist but are not read

        Raises CheckpointError if a tensor is missing or superfluous, or has a wrong shape.
        """
        check_tensors(self.source, [self.weight(*each) for each in shapes.items()], prefix, unread)

        def copied(name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
            into = torch.empty(shape, dtype=dtype, device=self.device)
            self.source.tensors.copy(name, into)
            return into

        def read(name: str) -> Tensor:
            found = self.weight(name, shapes[name]).read(copied, self.dtype)
            return found if isinstance(found, Tensor) else found.dequantize(self.dtype)

        return read
