"""Defines what weights.py needs from a checkpoint: tensors by name, and for each weight how the checkpoint stores it.

A `WeightSource` is a checkpoint of any file format, with tensor names as in Hugging Face checkpoints. It says how each
weight is stored: as one tensor of plain numbers, or quantized. `read` returns a quantized one as a QuantizedWeight.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from worker.kernels.weights.quantize import Kind
from worker.kernels.weights.quantize import quantize as quantize_rows
from worker.kernels.weights.quantized_weight import E4M3, INT8, CodeMap, QuantizedWeight, quantize_groups
from worker.model.checkpoint.checkpoint import CheckpointError

PLAIN = ("F32", "BF16", "F16")  # number formats without scales
# the code maps that quantize.py supports, with one scale per row
BY_ROW: dict[CodeMap, Kind] = {INT8: "int8", E4M3: "fp8"}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor that a checkpoint must hold. formats: the number formats in which the checkpoint may store it"""

    name: str
    shape: Shape
    formats: tuple[str, ...] = PLAIN


@dataclass(frozen=True, slots=True)
class Layout:
    """How a weight is quantized.

    code_map: what a code means
    group_size: how many inputs of a row share a scale; 0: all
    minimum: if true, each group also has a minimum, which is added to its numbers
    """

    code_map: CodeMap
    group_size: int = 0
    minimum: bool = False

    @property
    def shared(self) -> str:
        """Says for the log which numbers share a scale."""
        return f"{self.group_size} values" if self.group_size else "row"

    def nbytes(self, shape: Shape, scale_bytes: int = 4) -> int:
        """Returns how many bytes a weight of this shape takes in memory: codes, scales and minimums.

        scale_bytes: the size of one scale or minimum
        """
        rows, columns = shape
        groups = -(-columns // (self.group_size or columns))
        return rows * (-(-columns * self.code_map.bits // 8) + groups * scale_bytes * (1 + self.minimum))

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        """Quantizes a weight [N, K] of any float dtype by rounding to nearest, without minimums."""
        if self.group_size:
            return quantize_groups(weight, self.code_map, self.group_size)
        values, scale = quantize_rows(weight, BY_ROW[self.code_map])
        return QuantizedWeight(values.view(torch.uint8), self.code_map, scale[:, None], None, weight.shape[1])


class ReadTensor(Protocol):
    """Copies a stored tensor to the device, converted to `dtype` but otherwise unchanged, and counts the progress."""

    def __call__(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor: ...


class StoredWeight(Protocol):
    """Describes how a checkpoint stores one weight."""

    @property
    def name(self) -> str:
        """The name in Hugging Face checkpoints, for example `model.layers.0.self_attn.q_proj.weight`.

        A quantized weight has this name, too, although no single stored tensor does.
        """

    @property
    def shape(self) -> Shape: ...

    @property
    def layout(self) -> Layout | None:
        """How the weight is quantized; None if it is stored as plain numbers."""

    def tensors(self) -> Sequence[ExpectedTensor]:
        """Returns the tensors that store the weight, in the order in which they are read."""

    def read(self, read: ReadTensor, dtype: torch.dtype) -> Tensor | QuantizedWeight:
        """Reads the weight: as a tensor of `dtype`, or as a QuantizedWeight if it has a layout.

        Raises CheckpointError when stored numbers are invalid, for example NaN.
        """


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A weight, or a vector such as a norm, that is stored as one tensor of plain numbers.

    transposed: if true, the weight [N, K] is stored as [K, N]
    """

    name: str
    shape: Shape
    transposed: bool = False

    @property
    def layout(self) -> None:
        return None

    def tensors(self) -> Sequence[ExpectedTensor]:
        return [ExpectedTensor(self.name, self.shape[::-1] if self.transposed else self.shape)]

    def read(self, read: ReadTensor, dtype: torch.dtype) -> Tensor:
        (stored,) = self.tensors()
        numbers = read(stored.name, stored.shape, dtype)
        return numbers.T.contiguous() if self.transposed else numbers


class StoredTensors(Protocol):
    """The tensors of a checkpoint by name."""

    @property
    def folder(self) -> Path: ...

    def names(self) -> list[str]: ...

    def __contains__(self, name: str) -> bool: ...

    def where(self, name: str) -> Path:
        """Returns the file that holds a tensor, or the folder if no file holds it."""

    def shape(self, name: str) -> Shape: ...

    def format(self, name: str) -> str:
        """Returns the number format in which a tensor is stored: F32, BF16, F16 or another one."""

    def nbytes(self, name: str) -> int:
        """Returns the size of a stored tensor in bytes."""

    def expect(self, names: Iterable[str]) -> None:
        """Announces which tensors copy() will be called with next, in this order, so that they can be read ahead."""

    def copy(self, name: str, into: Tensor) -> None:
        """Copies a stored tensor into contiguous memory of the same shape, on any device and of any dtype."""


def check_finite(numbers: Tensor, name: str, tensors: StoredTensors) -> Tensor:
    """Returns the numbers. Raises CheckpointError if any number is NaN or infinite."""
    # aminmax() returns NaN if any number is NaN. It reads memory once, whereas isfinite() would make two more tensors.
    if numbers.numel() and not all(math.isfinite(end.item()) for end in numbers.aminmax()):
        raise CheckpointError(f"{tensors.where(name)}: tensor {name} contains a number that is not finite")
    return numbers


class WeightSource(Protocol):
    """A checkpoint that says how it stores each weight."""

    @property
    def tensors(self) -> StoredTensors: ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Endings of the names of tensors that belong to the model, but are not read."""

    def weight(self, name: str, shape: Shape, transposed: bool | None = False) -> StoredWeight:
        """Returns how the weight `name` is stored: the weight of a linear, the embedding or the head.

        transposed: if true, plain numbers are stored as [K, N]; None: they are if the stored shape is not [N, K].
            Quantized codes are never transposed.
        """

    def close(self) -> None: ...
