"""Defines what the loader needs from a checkpoint: tensors by name, and for each weight how the checkpoint stores it.

A `WeightSource` is a checkpoint of any file format, with tensor names as in Hugging Face checkpoints. It says how each
weight is stored: as one tensor of plain numbers, or quantized. `read` returns a quantized one as a QuantizedWeight.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shared.log import on_one_line
from worker.checkpoint.checkpoint import CheckpointError
from worker.ops.block_rows import BlockFormat, BlockRows
from worker.ops.quantized_weight import E4M3, INT8, CodeMap, Kind, QuantizedWeight, quantize_groups
from worker.ops.quantized_weight import quantize as quantize_rows

PLAIN = ("F32", "BF16", "F16")  # number formats without scales
NUMBERS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of tensors that hold numbers, not codes
# the code maps that worker/ops/quantized_weight.py supports, with one scale per row
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
    blocks: the block format in which one tensor of a file has the whole weight, unchanged; None: it is stored otherwise
    six_bits: as in QuantizedWeight
    """

    code_map: CodeMap
    group_size: int = 0
    minimum: bool = False
    blocks: BlockFormat | None = field(default=None, compare=False)
    six_bits: bool = field(default=False, compare=False)

    @property
    def shared(self) -> str:
        """Says for the log which numbers share a scale."""
        return f"{self.group_size} values" if self.group_size else "row"

    def nbytes(self, shape: Shape, scale_bytes: int = 4, *, narrow: bool = False) -> int:
        """Returns how many bytes a weight of this shape takes in memory: codes, scales and minimums.

        scale_bytes: the size of one scale or minimum
        narrow: whether codes that fit in six bits take six
        """
        bits = 6 if narrow and self.six_bits else self.code_map.bits
        rows, columns = shape
        groups = -(-columns // (self.group_size or columns))
        return rows * (-(-columns * bits // 8) + groups * scale_bytes * (1 + self.minimum))

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
    if numbers.numel() and not torch.stack(numbers.aminmax()).isfinite().all():  # a GPU is waited for once
        raise _not_finite(name, tensors)
    return numbers


def check_read(read: Tensor, name: str, tensors: StoredTensors) -> None:
    """Raises CheckpointError if a tensor that was read has a floating-point dtype and a value that is NaN or infinite.

    One such number in a norm or a matrix makes all logits NaN, from which only token 0 would be drawn.
    """
    if read.dtype not in NUMBERS:
        return
    try:
        check_finite(read, name, tensors)
    except CheckpointError as error:
        if read.dtype != torch.float16 or tensors.format(name) == "F16":
            raise
        raise CheckpointError(f"{error} in float16, whose range is small: --dtype bfloat16 has a wider one") from error


def check_finite_blocks(rows: BlockRows, name: str, tensors: StoredTensors) -> BlockRows:
    """Returns the rows. Raises CheckpointError if any scale or minimum is NaN or infinite."""
    if not math.isfinite(largest := rows.largest()):
        raise _not_finite(name, tensors)
    return replace(rows, known=largest)


def _not_finite(name: str, tensors: StoredTensors) -> CheckpointError:
    return CheckpointError(f"{tensors.where(name)}: tensor {name} contains a number that is not finite")


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


# Describes several linears of a checkpoint that become one linear in memory.

WEIGHT, BIAS = ".weight", ".bias"


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """Describes linears of the checkpoint whose rows are concatenated into one linear."""

    modules: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    bias: bool
    order: Tensor | None = None  # the row order in memory, within each module; None: the checkpoint's order
    transposed: bool | None = False  # if true, plain numbers are stored as [inputs, outputs]; None: their shape tells
    exact: bool = False  # if true, the weight always stays in full precision
    kept: tuple[Tensor, ...] | None = None  # for each module the rows that are used, as indices into `order`; None: all
    apart: int = 0  # how many rows at the end of the first module (in memory order) become a linear of their own

    @property
    def first_rows(self) -> int:
        """How many rows of the first module are used."""
        return self.rows[0] if self.kept is None else len(self.kept[0])

    @property
    def kept_rows(self) -> int:
        """How many rows of all modules are used."""
        return sum(self.rows if self.kept is None else map(len, self.kept))

    def orders(self, device: torch.device) -> list[Tensor | slice]:
        """Returns for each module an index that selects its used rows in memory order."""
        if self.kept is not None:
            whole = replace(self, kept=None).orders(device)
            rows = [kept.to(device) for kept in self.kept]
            return [own if isinstance(each, slice) else each[own] for each, own in zip(whole, rows, strict=True)]
        if self.order is None:
            return [slice(None)] * len(self.modules)
        starts = [sum(self.rows[:i]) for i in range(len(self.rows))]
        parts = self.order.to(device).split_with_sizes(self.rows)
        return [part - start for part, start in zip(parts, starts, strict=True)]

    def weights(self, prefix: str) -> list[tuple[str, Shape, bool | None]]:
        """Returns the arguments of WeightSource.weight for each module: name, shape, and `transposed`."""
        parts = zip(self.modules, self.rows, strict=True)
        return [(f"{prefix}{module}{WEIGHT}", (rows, self.columns), self.transposed) for module, rows in parts]

    def biases(self, prefix: str) -> list[PlainWeight]:
        parts = zip(self.modules, self.rows, strict=True)
        return [PlainWeight(f"{prefix}{module}{BIAS}", (rows,)) for module, rows in parts] if self.bias else []


# Finds the language model among the tensors of a checkpoint that may also have encoders and drafters.

EMBED = "embed_tokens"
DRAFTER = "mtp."  # name prefix of layers for multi-token prediction, which are not part of the language model


def find_embedding(tensors: StoredTensors) -> str | None:
    """Returns the full name of the embedding, for example `model.embed_tokens`; None if there is none."""
    found = [module for module in _modules(tensors) if f".{module}".endswith(f".{EMBED}")]
    return min((module for module in found if not module.startswith(DRAFTER)), key=len, default=None)


def find_head(tensors: StoredTensors, prefix: str, module: str) -> str | None:
    """Returns the full name of the language model's head, for example `language_model.lm_head`; None if there is none.

    prefix: the prefix of the language model's tensor names, for example `language_model.model.`. The head's name has
        this prefix, a shorter one (`language_model.`), or none. Heads under other prefixes belong to other models.
    module: the last part of the name, for example `lm_head`
    """
    modules, folders = _modules(tensors), prefix.split(".")[:-1]
    names = (".".join((*folders[:depth], module)) for depth in range(len(folders) + 1))
    return next((name for name in names if name in modules), None)


def _modules(tensors: StoredTensors) -> set[str]:
    """Returns the full names of all modules with a weight, plain or quantized."""
    paths = (name.rpartition(".") for name in tensors.names())
    return {module for module, _, kind in paths if kind.startswith(("weight", "qweight"))}


# Checks that a checkpoint has the tensors that its model needs, before any tensor is read.


def check_tensors(source: WeightSource, weights: Sequence[StoredWeight], prefix: str, unread: tuple[str, ...]) -> int:
    """Checks the names, shapes and formats of the tensors, and returns how many bytes will be read.

    weights: all weights that the model needs; a weight that is read twice is listed twice
    prefix: the prefix of the model's tensor names
    unread: prefixes of tensors that the checkpoint may have although the model does not need them

    Raises CheckpointError when a tensor is missing, superfluous, misshaped or stored in another format.
    """
    tensors = source.tensors
    read = [tensor for weight in weights for tensor in weight.tensors()]
    expected = {tensor.name: tensor for tensor in read}
    for name, tensor in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{tensors.folder}: tensor {name} is missing")
        if tensors.shape(name) != tensor.shape:
            raise CheckpointError(
                f"{tensors.where(name)}: tensor {name} has shape {list(tensors.shape(name))}; "
                f"by the model's config it is {list(tensor.shape)}"
            )
        if (stored := tensors.format(name)) not in tensor.formats:
            raise CheckpointError(
                f"{tensors.where(name)}: tensor {name} is stored as {stored}; supported are {', '.join(tensor.formats)}"
            )
    for name in sorted(set(tensors.names()) - expected.keys()):
        if name.startswith(prefix) and not name.endswith(source.ignored) and not name.startswith(unread):
            raise CheckpointError(f"{tensors.where(name)}: tensor {on_one_line(name)} does not belong to this model")
    return sum(tensors.nbytes(tensor.name) for tensor in read)
