"""Reads checkpoints with `quant_method: fp8`, as of Qwen and DeepSeek: e4m3 codes, and a scale per tensor or block."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.checkpoint.checkpoint import CheckpointError
from worker.checkpoint.stored_weight import ExpectedTensor, Layout, ReadTensor, Shape, StoredTensors, check_finite
from worker.ops.quantized_weight import E4M3, CodeMap, QuantizedWeight
from worker.quantization.awq import input_order, signed, unpack
from worker.spec import Activations, StoredQuantization

# Reads a weight that is stored as values and a grid of scales, with one scale for each block of values.
#
# A block covers some rows and columns of the weight. It may also have a zero point. A scale that several rows share
# is repeated for each row, which is exact.

UNSET = -1  # in a g_idx that compressed-tensors has not filled, all entries have this value
NOT_A_NUMBER = 0x7F  # NaN in E4M3, without the sign bit


@dataclass(frozen=True, slots=True)
class Block:
    """How many rows and how many columns share a scale; 0 means all."""

    rows: int
    columns: int

    @property
    def by_row(self) -> bool:
        """Whether all columns share a scale, so that a row has a single scale. Several rows may share it, too."""
        return self.columns == 0

    def grid(self, shape: Shape) -> tuple[int, int]:
        """Returns how many scales a weight of this shape has along its rows and along its columns."""
        steps = zip(shape, (self.rows, self.columns), strict=True)
        rows, columns = (-(-size // step) if step else 1 for size, step in steps)
        return rows, columns

    def grid_shape(self, shape: Shape, actual: Shape) -> Shape:
        """Returns the expected shape of the tensor of scales.

        actual: its shape in the checkpoint, which is returned if it is the grid, with or without dimensions of size 1
        """
        grid = self.grid(shape)
        fits = actual == grid or (grid[1] == 1 and actual == grid[:1]) or (grid == (1, 1) and actual == ())
        return actual if fits else grid

    def for_rows(self, grid: Tensor, shape: Shape) -> Tensor:
        """Repeats the rows of a stored grid, so that each row of a weight [N, K] has scales of its own. Returns [N,
        groups].
        """
        down, across = self.grid(shape)
        grid = grid.reshape(down, across)
        rows = grid.repeat_interleave(self.rows, 0)[: shape[0]] if self.rows else grid.expand(shape[0], across)
        return rows.contiguous()

    def __str__(self) -> str:
        one = {(0, 0): "a tensor", (1, self.columns): f"{self.columns} values", (1, 0): "a row"}
        return one.get((self.rows, self.columns), f"{self.rows} x {self.columns} values")


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight [N, K] of values and scales.

    bits: bits of a packed code; packed codes are unsigned, several in an int32. 0: each code is an int8 or float8
    zero: the tensor of zero points, if there is one; zero points of packed codes are packed along the weight's rows
    g_idx: the tensor with the group of each input, if there is one
    ordered: if true, g_idx must be filled; otherwise all its entries may be UNSET
    """

    name: str
    shape: Shape
    tensors_of: StoredTensors
    block: Block
    code_map: CodeMap
    bits: int
    values: ExpectedTensor
    scale: ExpectedTensor
    zero: ExpectedTensor | None = None
    g_idx: ExpectedTensor | None = None
    ordered: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(self.code_map, self.block.columns, self.zero is not None)

    @property
    def group_size(self) -> int:
        return self.block.columns or self.shape[1]

    def tensors(self) -> list[ExpectedTensor]:
        return [tensor for tensor in (self.values, self.scale, self.zero, self.g_idx) if tensor is not None]

    def read(self, read: ReadTensor, dtype: torch.dtype) -> QuantizedWeight:
        values = read(self.values.name, self.values.shape, FORMATS[self.values.formats[0]])
        stored = check_finite(
            read(self.scale.name, self.scale.shape or (1,), torch.float32), self.scale.name, self.tensors_of
        )
        scale = self.block.for_rows(stored, self.shape)
        zero, order = self._zero(read), self._order(read)
        if self.bits:
            codes = unpack(values, self.bits)[:, : self.shape[1]]
            return signed(codes, self.bits, scale, zero, self.group_size, order)
        codes = values.view(torch.uint8)
        if self.code_map is E4M3:
            check_no_nan(codes, self.name, self.tensors_of)
        minimum = None if zero is None or not bool(zero.any()) else -scale * zero
        codes = codes if order is None else codes.index_select(1, order)
        return QuantizedWeight(codes, self.code_map, scale, minimum, self.group_size, order)

    def _zero(self, read: ReadTensor) -> Tensor | None:
        """Reads the zero points [N, groups]. They are unsigned if the codes are packed."""
        if self.zero is None:
            return None
        stored = read(self.zero.name, self.zero.shape or (1,), FORMATS[self.zero.formats[0]])
        if stored.dtype == torch.int32:
            return unpack(stored.T, self.bits).T[: self.shape[0]]
        by_row = self.block.for_rows(stored, self.shape).float()
        return by_row + (1 << (self.bits - 1)) if self.bits else by_row

    def _order(self, read: ReadTensor) -> Tensor | None:
        if self.g_idx is None:
            return None
        index = read(self.g_idx.name, self.g_idx.shape, torch.int32)
        if not self.ordered and bool((index == UNSET).all()):
            return None
        return input_order(index, self.group_size, self.g_idx.name, self.tensors_of)


def check_no_nan(codes: Tensor, name: str, tensors: StoredTensors) -> None:
    """Raises CheckpointError if codes of e4m3 contain NaN."""
    if bool((codes & NOT_A_NUMBER == NOT_A_NUMBER).any()):
        raise CheckpointError(f"{tensors.where(name)}: tensor {name} contains NaN")


FORMATS = {"I32": torch.int32, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}


def block_of(size: Any, method: str) -> Block:
    """Reads a block size [rows, columns] from a config. Raises CheckpointError if it is malformed or not supported."""
    if size is None:
        return Block(0, 0)
    if isinstance(size, list) and len(size) == 2 and all(isinstance(length, int) and length > 0 for length in size):
        if size[1] % 16 == 0:
            return Block(*size)
        raise CheckpointError(f"quant_method {method!r}: scales for {size[1]} inputs are not for a multiple of 16")
    raise CheckpointError(f"quant_method {method!r}: {size!r} is not a valid block size of weights")


@dataclass(frozen=True, slots=True)
class Fp8:
    """The settings of an fp8 checkpoint. A linear is quantized if the checkpoint has its scales."""

    block: Block
    activations: Activations

    @property
    def ignored(self) -> tuple[str, ...]:
        return ()

    @property
    def stored(self) -> StoredQuantization:
        return StoredQuantization("fp8", str(self.block), self.block.by_row, self.activations)

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> ScaledWeight | None:
        scale = next((name + ending for ending in ("_scale", "_scale_inv") if name + ending in tensors), "")
        if not scale:
            return None
        return scaled_weight(name, shape, tensors, scale, self.block)


def scaled_weight(name: str, shape: Shape, tensors: StoredTensors, scale: str, block: Block) -> ScaledWeight:
    """Returns an e4m3 weight with scales in the tensor `scale`.

    block: how many values share a scale. If all do by the config, each row may have a scale of its own all the same, or
        each half of the rows: the gate and the up projection of an expert, stacked.
    """
    stored = tensors.shape(scale)
    if block == Block(0, 0) and shape[0] > 1:
        if stored in (shape[:1], (shape[0], 1)):
            block = Block(1, 0)
        elif stored == (2, 1) and shape[0] % 2 == 0:
            block = Block(shape[0] // 2, 0)
    return ScaledWeight(
        name, shape, tensors, block, E4M3, 0, ExpectedTensor(name, shape, ("F8_E4M3",)),
        ExpectedTensor(scale, block.grid_shape(shape, stored)),
    )  # fmt: skip


def read(settings: Mapping[str, Any]) -> Fp8:
    """Reads a quantization_config. Raises CheckpointError when a setting is not supported."""
    if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"quant_method 'fp8': fmt {settings['fmt']!r} is not supported; supported is e4m3")
    block = block_of(settings.get("weight_block_size"), "fp8")
    tokens = settings.get("activation_scheme", "dynamic") == "dynamic" and block.by_row
    return Fp8(block, "dynamic" if tokens else "other")
