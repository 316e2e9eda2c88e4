"""Rows of weights in a block format of GGUF: the formats' description, and rows that keep the bytes of the file.

A row consists of blocks of 32 to 256 numbers. `BlockFormat.quantized_weight` unpacks rows to codes, scales and
minimums, which needs two to four times their memory. So weights for the C library stay in their blocks (BlockRows)
until they are packed, panel by panel; and an embedding stays so for good (worker/ops/embedding).

worker/quantization/gguf.py has the formats, with a function in PyTorch for each of them that defines what its blocks
mean. The C library (linear/csrc/unpack_blocks.c) unpacks all of them to the same bits.
"""

import struct
from collections.abc import Callable, Sequence
from ctypes import c_int, c_long, c_uint32, c_void_p
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.ops.native import address, kernels, library
from worker.ops.quantized_weight import CodeMap, QuantizedWeight, by_rows

Parts = tuple[Tensor, Tensor, Tensor | None]  # codes [n, numbers of a block]; scale and minimum [n, groups of a block]
# the order of BLOCK_FORMATS in linear/csrc/unpack_blocks.c
IN_C = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
    "NVFP4", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ2_0", "TQ1_0",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block format.

    numbers, nbytes: how many numbers and how many bytes a block has
    group_size: how many numbers share a scale
    unpack: makes codes, scales and minimums from the bytes of blocks
    grid: returns the table that the indices of a format with a grid mean, uint8 [entries, 4 or 8]
    scales: the bytes of a block that hold its scales and minimums and nothing else; None: they are in several places
    six_bits: whether all codes, which are INT8's, are integers from -32 to 31
    """

    name: str
    numbers: int
    nbytes: int
    code_map: CodeMap
    group_size: int
    minimum: bool
    unpack: Callable[[Tensor], Parts]
    grid: Callable[[], Tensor] | None = None
    scales: slice | None = None
    six_bits: bool = False

    def row_bytes(self, columns: int) -> int:
        """Returns the size of a weight's row in bytes. columns: the numbers of a row, a multiple of `numbers`"""
        return columns // self.numbers * self.nbytes

    def quantized_weight(self, rows: Tensor) -> QuantizedWeight:
        """Returns the weight [N, K]. rows: the bytes of its rows, uint8 [N, row_bytes(K)]"""
        n, blocks = rows.shape[0], rows.shape[1] // self.nbytes
        groups = blocks * self.numbers // self.group_size
        codes = torch.empty(n, blocks * self.numbers, dtype=torch.uint8, device=rows.device)
        scale = torch.empty(n, groups, device=rows.device)
        minimum = torch.empty(n, groups, device=rows.device) if self.minimum else None

        def convert(part: slice) -> None:
            some_codes, some_scale, some_minimum = self.unpack(rows[part].reshape(-1, self.nbytes))
            codes[part].view(some_codes.shape).copy_(some_codes)
            scale[part].view(some_scale.shape).copy_(some_scale)
            if minimum is not None and some_minimum is not None:
                minimum[part].view(some_minimum.shape).copy_(some_minimum)

        if not unpack_blocks(self, rows, codes, scale, minimum):
            by_rows(n, codes.shape[1], convert, on_gpu=rows.is_cuda)
        return QuantizedWeight(codes, self.code_map, scale, minimum, self.group_size, six_bits=self.six_bits)

    @property
    def is_unpacked_in_c(self) -> bool:
        return self.name in IN_C and bool(kernels())

    @property
    def in_c(self) -> tuple[c_int, c_void_p]:
        """The format as the first two arguments of the functions in unpack_blocks.c."""
        grid = None if self.grid is None else self.grid()  # a table that lives as long as the process
        return c_int(IN_C.index(self.name)), c_void_p(address(grid))


def unpack_blocks(format: BlockFormat, rows: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None) -> bool:
    """Unpacks a weight's rows [N, bytes] to codes [N, K], and scales and minimums [N, groups].

    Returns False, and does nothing, if the rows are on a GPU or the library is not available.
    """
    if rows.is_cuda or not format.is_unpacked_in_c or (found := library()) is None:
        return False
    assert all(tensor is None or tensor.is_contiguous() for tensor in (rows, codes, scale, minimum))
    found.unpack_blocks(
        *format.in_c, c_void_p(rows.data_ptr()), c_long(len(rows)), c_long(rows.shape[1] // format.nbytes),
        *(c_void_p(address(one)) for one in (codes, scale, minimum)), c_int(torch.get_num_threads()),
    )  # fmt: skip
    return True


@dataclass(frozen=True, slots=True)
class BlockRows:
    """A weight [N, K] that is not unpacked: the bytes of its rows. It has what a QuantizedWeight has, on demand."""

    stored: Tensor  # uint8 [N, bytes of a row], on the CPU
    format: BlockFormat
    known: float | None = None  # the result of `largest`, if it is known

    @property
    def shape(self) -> tuple[int, int]:
        n, nbytes = self.stored.shape
        return n, nbytes // self.format.nbytes * self.format.numbers

    @property
    def is_cuda(self) -> bool:
        return self.stored.is_cuda

    @property
    def code_map(self) -> CodeMap:
        return self.format.code_map

    @property
    def group_size(self) -> int:
        return self.format.group_size

    @property
    def has_minimum(self) -> bool:
        return self.format.minimum

    @property
    def code_bits(self) -> int:
        """In how many bits each code fits."""
        return 6 if self.format.six_bits else self.format.code_map.bits

    @property
    def input_order(self) -> None:
        return None

    def rows(self, index: Tensor | slice) -> "BlockRows":
        """Returns a weight with the rows that `index` selects, in the order of `index`."""
        if isinstance(index, slice) and index == slice(None):
            return self
        return replace(self, stored=self.stored[index], known=None)

    def quantized(self) -> QuantizedWeight:
        return self.format.quantized_weight(self.stored)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [N, K], computed in float32, rounded once to `dtype`."""
        return self.quantized().dequantize(dtype)

    def largest(self) -> float:
        """Returns the largest absolute value of all scales and minimums; infinity or NaN if there are such numbers."""
        if self.known is not None:
            return self.known
        if not self.format.is_unpacked_in_c or (found := library()) is None:
            weight = self.quantized()
            numbers = [one.flatten() for one in (weight.scale, weight.minimum) if one is not None and one.numel()]
            return float(torch.cat(numbers).abs().amax()) if numbers else 0.0  # NaN if any number is
        n, nbytes = self.stored.shape
        assert self.stored.is_contiguous()
        found.largest_in_blocks.restype = c_uint32
        bits = found.largest_in_blocks(
            *self.format.in_c, c_void_p(self.stored.data_ptr()), c_long(n), c_long(nbytes // self.format.nbytes),
            c_int(torch.get_num_threads()),
        )  # fmt: skip
        return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def joined_rows(parts: Sequence[BlockRows]) -> BlockRows:
    """Concatenates the rows of weights in the same block format."""
    first, *others = parts
    return BlockRows(torch.cat([one.stored for one in parts]), first.format) if others else first
