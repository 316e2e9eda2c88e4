"""Unpacks GGUF's block formats: the bytes of a block become codes, scales and minimums of a QuantizedWeight.

A row of a weight consists of blocks of 32 or 256 numbers. llama.cpp's ggml defines the formats, and
`tests/worker/quantization/test_blocks.py` compares this module with `gguf.quants.dequantize`. All functions take the
bytes of blocks as uint8 [n, bytes of a block] on any device. On the CPU, the C library unpacks them to the same bits.

INT4 has signed codes. So an unsigned code of four bits becomes code - 8, and its minimum becomes minimum + 8 * scale.
Codes of five and six bits become INT8. The formats with fewer bits than four follow below.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from shared.gguf.grids import grid
from shared.gguf.index import TiledHeads
from worker.checkpoint.checkpoint import CheckpointError
from worker.checkpoint.stored_weight import (
    PLAIN,
    WEIGHT,
    ExpectedTensor,
    Layout,
    ReadTensor,
    Shape,
    StoredTensors,
    check_finite,
)
from worker.ops.block_rows import BlockFormat, Parts
from worker.ops.quantized_weight import (
    E2M1,
    INT4,
    INT8,
    IQ1,
    IQ2,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    NEGATIVE,
    QuantizedWeight,
)
from worker.quantization.gguf_tensors import column_order
from worker.spec import StoredQuantization

# Unpacks GGUF's block formats with fewer than three bits or with grids, and NVFP4.
#
# The formats IQ1, IQ2 and IQ3 have a grid: a table of entries of four or eight numbers. A block has indices of entries,
# signs and scales. A grid has two to eight different numbers. With its sign, each number of a weight is one of at most
# 16 values, so it becomes a code of four bits without loss. The lower three bits of a code are the number's index in
# ascending order, the highest bit is the sign. TQ1_0 and TQ2_0 have the numbers -1, 0 and 1.
#
# All functions take the bytes of blocks as uint8 [n, bytes of a block] on any device.

TERNARY_GROUP = 64  # a block of 256 ternary numbers has one scale, which is repeated (see BlockFormat.group_size)


def half(blocks: Tensor, at: int) -> Tensor:
    """Returns the float16 at byte `at` of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def fields(stored: Tensor, width: int, shifts: Sequence[int], mask: int) -> Tensor:
    """Unpacks bit fields of bytes [n, m] to uint8 [n, m * len(shifts)].

    From each run of `width` bytes, first the field at the first shift is taken from every byte, then the field at the
    second shift from every byte, and so on.
    """
    runs = stored.reshape(len(stored), -1, width)
    return torch.stack([runs >> by & mask for by in shifts], 2).flatten(1)


def nibbles(stored: Tensor, width: int) -> Tensor:
    return fields(stored, width, (0, 4), 15)


def _words(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns little-endian words of bytes [n, m] as int32 [n, m / size]. Words of 16 bits are not negative."""
    words = stored.clone(memory_format=torch.contiguous_format).view(dtype).int()  # a copy begins at a whole word
    return words & 0xFFFF if dtype == torch.int16 else words


@cache
def entries(type: str) -> Tensor:
    """Returns the entries of a grid, uint8 [count, 4 or 8]. type: the name of a block format with a grid"""
    width, numbers = grid(type)
    return torch.frombuffer(bytearray(numbers), dtype=torch.uint8).view(-1, width)


def _entries(type: str, index: Tensor) -> Tensor:
    """Returns the entries [n, m * width] of a grid. index: the entries' indices [n, m], of any integer dtype"""
    return entries(type).to(index.device)[index.int()].flatten(1)


def _negative(signs: Tensor) -> Tensor:
    """Returns NEGATIVE where a bit is set, else 0: uint8 [n, m * 8]. signs: bytes [n, m], the lowest bit first"""
    return fields(signs, 1, range(8), 1) * NEGATIVE


def _even_signs(stored: Tensor) -> Tensor:
    """Returns the signs of eight numbers as a byte, from seven bits: the number of minus signs is even."""
    odd = stored
    for by in (4, 2, 1):
        odd = odd ^ odd >> by
    return (stored | (odd & 1) << 7).to(torch.uint8)


def _sevens(words: Tensor) -> Tensor:
    """Returns the four groups of seven bits of each word [n, m], from the lowest bits on: [n, m * 4]."""
    return torch.stack([words >> by & 127 for by in (0, 7, 14, 21)], 2).flatten(1)


def iq2_xxs(blocks: Tensor) -> Parts:
    """Unpacks IQ2_XXS. Eight bytes are four indices and a word, which has signs and, in its top bits, a scale."""
    runs = blocks[:, 2:].reshape(len(blocks), 8, 8)
    words = _words(runs[..., 4:].flatten(1), torch.int32)
    codes = _entries("IQ2_XXS", runs[..., :4].flatten(1)) | _negative(_even_signs(_sevens(words)))
    return codes, half(blocks, 0) * (0.5 + (words >> 28 & 15)) * 0.25, None


def iq2_xs(blocks: Tensor) -> Parts:
    """Unpacks IQ2_XS. A word of 16 bits has an index of nine bits and seven bits of signs."""
    words = _words(blocks[:, 2:66], torch.int16)
    codes = _entries("IQ2_XS", words & 511) | _negative(_even_signs(words >> 9))
    return codes, half(blocks, 0) * (0.5 + nibbles(blocks[:, 66:], 1)) * 0.25, None


def iq2_s(blocks: Tensor) -> Parts:
    """Unpacks IQ2_S, whose signs are whole bytes, and whose indices have two more bits elsewhere."""
    index = blocks[:, 2:34].int() | fields(blocks[:, 66:74], 1, (0, 2, 4, 6), 3).int() << 8
    codes = _entries("IQ2_S", index) | _negative(blocks[:, 34:66])
    return codes, half(blocks, 0) * (0.5 + nibbles(blocks[:, 74:], 1)) * 0.25, None


def iq3_xxs(blocks: Tensor) -> Parts:
    """Unpacks IQ3_XXS. Eight words have the signs of 32 numbers each and, in their top bits, a scale."""
    words = _words(blocks[:, 66:], torch.int32)
    codes = _entries("IQ3_XXS", blocks[:, 2:66]) | _negative(_even_signs(_sevens(words)))
    return codes, half(blocks, 0) * (0.5 + (words >> 28 & 15)) * 0.5, None


def iq3_s(blocks: Tensor) -> Parts:
    """Unpacks IQ3_S, whose signs are whole bytes, and whose indices have one more bit elsewhere."""
    index = blocks[:, 2:66].int() | fields(blocks[:, 66:74], 1, range(8), 1).int() << 8
    codes = _entries("IQ3_S", index) | _negative(blocks[:, 74:106])
    return codes, half(blocks, 0) * (1 + 2 * nibbles(blocks[:, 106:], 1).int()), None


def iq1_s(blocks: Tensor) -> Parts:
    """Unpacks IQ1_S. A word of 16 bits has four times three bits of indices, a scale, and the sign of the eighth."""
    words = _words(blocks[:, 34:], torch.int16)
    high = torch.stack([words >> by & 7 for by in (0, 3, 6, 9)], 2).flatten(1)
    subtracted = ((words >> 15) * NEGATIVE).to(torch.uint8).repeat_interleave(32, 1)
    codes = _entries("IQ1_S", blocks[:, 2:34].int() | high << 8) | subtracted
    return codes, half(blocks, 0) * (2 * (words >> 12 & 7) + 1) * 0.125, None


def iq1_m(blocks: Tensor) -> Parts:
    """Unpacks IQ1_M. Its float16 scale is in the top four bits of four words, whose other bits are 16 scales."""
    words = _words(blocks[:, 48:], torch.int16)
    parts = [words[:, i] >> 12 << 4 * i for i in range(4)]
    scale = (parts[0] | parts[1] | parts[2] | parts[3]).to(torch.int16).view(torch.float16).float()[:, None]
    high = nibbles(blocks[:, 32:48], 1)
    subtracted = ((high >> 3) * NEGATIVE).repeat_interleave(8, 1)
    codes = _entries("IQ1_M", blocks[:, :32].int() | (high & 7).int() << 8) | subtracted
    scales = torch.stack([words >> by & 7 for by in (0, 3, 6, 9)], 2).flatten(1)
    return codes, scale * (2 * scales + 1) * 0.125, None


def tq1_0(blocks: Tensor) -> Parts:
    """Unpacks TQ1_0. A byte has five ternary digits as a fraction of 256: times 3 is the first digit, and so on."""
    digits = [_digits(blocks[:, :32], 5), _digits(blocks[:, 32:48], 5), _digits(blocks[:, 48:52], 4)]
    return torch.cat(digits, 1) - 1 & 15, _ternary_scale(blocks, 52), None


def _digits(stored: Tensor, count: int) -> Tensor:
    """Returns the first digit of every byte [n, m], then the second digit of every byte, and so on: [n, m * count]."""
    shifted = [stored * 3**i for i in range(count)]  # bytes, so that digits before the point go
    return torch.cat([(one.int() * 3 >> 8).to(torch.uint8) for one in shifted], 1)


def tq2_0(blocks: Tensor) -> Parts:
    return fields(blocks[:, :64], 32, (0, 2, 4, 6), 3) - 1 & 15, _ternary_scale(blocks, 64), None


def _ternary_scale(blocks: Tensor, at: int) -> Tensor:
    return half(blocks, at).expand(-1, 256 // TERNARY_GROUP)


def nvfp4(blocks: Tensor) -> Parts:
    """Unpacks NVFP4, whose scales are E4M3 without a sign. The byte 0x7F is NaN in E4M3, but 0 here, as in ggml."""
    stored = blocks[:, :4]
    exponent, mantissa = (stored >> 3 & 15).int(), (stored & 7).float()
    one = torch.ones_like(mantissa)
    scale = torch.where(exponent == 0, mantissa * 2.0**-9, torch.ldexp(one + mantissa / 8, exponent - 7))
    return nibbles(blocks[:, 4:], 8), torch.where(stored == 0x7F, 0.0, scale), None


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:], half(blocks, 0), None


def _q4_0(blocks: Tensor) -> Parts:
    return nibbles(blocks[:, 2:], 16) ^ 8, half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    scale = half(blocks, 0)
    return nibbles(blocks[:, 4:], 16) ^ 8, scale, half(blocks, 2) + 8 * scale


def _q5_0(blocks: Tensor) -> Parts:
    high = fields(blocks[:, 2:6], 1, range(8), 1)
    return (nibbles(blocks[:, 6:], 16) | high << 4) - 16, half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Parts:
    high = fields(blocks[:, 4:8], 1, range(8), 1)
    return nibbles(blocks[:, 8:], 16) | high << 4, half(blocks, 0), half(blocks, 2)


def _q2_k(blocks: Tensor) -> Parts:
    scales = blocks[:, :16]
    codes = fields(blocks[:, 16:80], 32, (0, 2, 4, 6), 3)
    return codes, half(blocks, 80) * (scales & 15), -half(blocks, 82) * (scales >> 4)


def _q3_k(blocks: Tensor) -> Parts:
    low, high = fields(blocks[:, 32:96], 32, (0, 2, 4, 6), 3), fields(blocks[:, :32], 32, range(8), 1)
    scales = nibbles(blocks[:, 96:104], 8) | fields(blocks[:, 104:108], 4, (0, 2, 4, 6), 3) << 4
    codes = (low | high << 2) - 4 & 15  # -4 to 3
    return codes, half(blocks, 108) * (scales.int() - 32), None


def _q4_k(blocks: Tensor) -> Parts:
    scale, minimum = _k_scales(blocks)
    return nibbles(blocks[:, 16:], 32) ^ 8, scale, minimum + 8 * scale


def _q5_k(blocks: Tensor) -> Parts:
    scale, minimum = _k_scales(blocks)
    return nibbles(blocks[:, 48:], 32) | fields(blocks[:, 16:48], 32, range(8), 1) << 4, scale, minimum


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales [n, 8] and minimums [n, 8] of Q4_K or Q5_K. A block has 8 + 8 six-bit numbers in 12 bytes."""
    first, second, third = (blocks[:, at : at + 4].contiguous().view(torch.int32) for at in (4, 8, 12))
    six, four, two = (bits * 0x01010101 for bits in (63, 15, 48))  # masks of bits in each byte of a 32-bit word
    scales = torch.cat((first & six, third & four | first >> 2 & two), 1).view(torch.uint8)
    minimums = torch.cat((second & six, third >> 4 & four | second >> 2 & two), 1).view(torch.uint8)
    return half(blocks, 0) * scales.float(), -half(blocks, 2) * minimums.float()


def _q6_k(blocks: Tensor) -> Parts:
    high = fields(blocks[:, 128:192], 32, (0, 2, 4, 6), 3)
    scales = blocks[:, 192:208].view(torch.int8)
    return (nibbles(blocks[:, :128], 64) | high << 4) - 32, half(blocks, 208) * scales, None


def _iq4_nl(blocks: Tensor) -> Parts:
    return nibbles(blocks[:, 2:], 16), half(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> Parts:
    scales = nibbles(blocks[:, 4:8], 1) | fields(blocks[:, 2:4], 1, (0, 2, 4, 6), 3) << 4
    return nibbles(blocks[:, 8:], 16), half(blocks, 0) * (scales.int() - 32), None


def _mxfp4(blocks: Tensor) -> Parts:
    """Unpacks MXFP4, whose scale is a power of two (e8m0).

    ggml uses half of this scale and doubles the values of the codes, which gives the same products.
    """
    scale = torch.ldexp(torch.ones(len(blocks), 1, device=blocks.device), blocks[:, :1].int() - 127)
    return nibbles(blocks[:, 1:], 16), scale, None


ALL = (
    BlockFormat("Q8_0", 32, 34, INT8, 32, False, _q8_0, scales=slice(0, 2)),
    BlockFormat("Q4_0", 32, 18, INT4, 32, False, _q4_0, scales=slice(0, 2)),
    BlockFormat("Q4_1", 32, 20, INT4, 32, True, _q4_1, scales=slice(0, 4)),
    BlockFormat("Q5_0", 32, 22, INT8, 32, False, _q5_0, scales=slice(0, 2), six_bits=True),
    BlockFormat("Q5_1", 32, 24, INT8, 32, True, _q5_1, scales=slice(0, 4), six_bits=True),
    BlockFormat("Q2_K", 256, 84, INT4, 16, True, _q2_k),
    BlockFormat("Q3_K", 256, 110, INT4, 16, False, _q3_k, scales=slice(96, 110)),
    BlockFormat("Q4_K", 256, 144, INT4, 32, True, _q4_k, scales=slice(0, 16)),
    BlockFormat("Q5_K", 256, 176, INT8, 32, True, _q5_k, scales=slice(0, 16), six_bits=True),
    BlockFormat("Q6_K", 256, 210, INT8, 16, False, _q6_k, scales=slice(192, 210), six_bits=True),
    BlockFormat("IQ4_NL", 32, 18, IQ4_NL, 32, False, _iq4_nl, scales=slice(0, 2)),
    BlockFormat("IQ4_XS", 256, 136, IQ4_NL, 32, False, _iq4_xs, scales=slice(0, 8)),
    BlockFormat("MXFP4", 32, 17, E2M1, 32, False, _mxfp4, scales=slice(0, 1)),
    BlockFormat("NVFP4", 64, 36, E2M1, 16, False, nvfp4, scales=slice(0, 4)),
    BlockFormat("IQ3_S", 256, 110, IQ3_S, 32, False, iq3_s, partial(entries, "IQ3_S")),
    BlockFormat("IQ3_XXS", 256, 98, IQ3_XXS, 32, False, iq3_xxs, partial(entries, "IQ3_XXS")),
    BlockFormat("IQ2_S", 256, 82, IQ2, 16, False, iq2_s, partial(entries, "IQ2_S")),
    BlockFormat("IQ2_XS", 256, 74, IQ2, 16, False, iq2_xs, partial(entries, "IQ2_XS")),
    BlockFormat("IQ2_XXS", 256, 66, IQ2, 32, False, iq2_xxs, partial(entries, "IQ2_XXS")),
    BlockFormat("IQ1_M", 256, 56, IQ1, 16, False, iq1_m, partial(entries, "IQ1_M")),
    BlockFormat("IQ1_S", 256, 50, IQ1, 32, False, iq1_s, partial(entries, "IQ1_S")),
    BlockFormat("TQ2_0", 256, 66, INT4, TERNARY_GROUP, False, tq2_0, scales=slice(64, 66)),
    BlockFormat("TQ1_0", 256, 54, INT4, TERNARY_GROUP, False, tq1_0, scales=slice(52, 54)),
)
FORMATS: Mapping[str, BlockFormat] = {each.name: each for each in ALL}


# Reads weights in block formats, from checkpoints with `quant_method: gguf`, as shared/gguf makes from GGUF files.


EXPERT, FIRST_EXPERT = re.compile(r"\.experts\.\d+\."), ".experts.0."


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight [N, K] in a block format.

    type: the name of the format, which may be an unsupported one
    factor: the tensor with the one number by which the weight is multiplied; "": there is none
    columns: the index in the file of each column of the weight; None: the order is the same
    """

    name: str
    shape: Shape
    type: str
    stored_in: StoredTensors
    factor: str = ""
    columns: Tensor | None = None

    @property
    def _format(self) -> BlockFormat:
        return FORMATS[self.type]

    @property
    def layout(self) -> Layout | None:
        if self.type not in FORMATS:
            return None  # check_tensors will refuse the type
        stays = self._format if not self.factor and self.columns is None else None
        form = self._format
        return Layout(form.code_map, form.group_size, form.minimum, stays, form.six_bits)

    def tensors(self) -> Sequence[ExpectedTensor]:
        weight = ExpectedTensor(self.name, self.shape, (*PLAIN, *FORMATS))
        return [weight, self._expected_factor] if self.factor else [weight]

    @property
    def _expected_factor(self) -> ExpectedTensor:
        stored = self.stored_in.shape(self.factor) if self.factor in self.stored_in else ()
        return ExpectedTensor(self.factor, stored if stored in ((), (1,)) else (1,), ("F32",))

    def read(self, read: ReadTensor, dtype: torch.dtype) -> Tensor | QuantizedWeight:
        rows = read(self.name, (self.shape[0], self._format.row_bytes(self.shape[1])), torch.uint8)
        weight = self._format.quantized_weight(rows)
        if self.factor:
            weight = self._multiplied(weight, read(self.factor, (1,), torch.float32))
        check_finite(weight.scale, self.name, self.stored_in)
        if weight.minimum is not None:
            check_finite(weight.minimum, self.name, self.stored_in)
        return weight if self.columns is None else self._reordered(weight, self.columns.to(weight.codes.device))

    def _multiplied(self, weight: QuantizedWeight, factor: Tensor) -> QuantizedWeight:
        minimum = None if weight.minimum is None else weight.minimum * factor
        return replace(weight, scale=weight.scale * factor, minimum=minimum)

    def _reordered(self, weight: QuantizedWeight, columns: Tensor) -> QuantizedWeight:
        """Reorders columns. Groups of columns stay together, so a group keeps its scale and minimum.

        Raises CheckpointError if a group would have to be split.
        """
        size = weight.group_size
        groups = columns[::size] // size
        if not torch.equal(columns, (groups[:, None] * size + torch.arange(size, device=columns.device)).flatten()):
            raise CheckpointError(
                f"{self.stored_in.where(self.name)}: tensor {self.name} is stored as {self.type}, whose groups of "
                f"{size} columns belong to several value heads; supported are value heads of whole groups"
            )
        minimum = None if weight.minimum is None else weight.minimum[:, groups]
        return replace(weight, codes=weight.codes[:, columns], scale=weight.scale[:, groups], minimum=minimum)


@dataclass(frozen=True, slots=True)
class GgufMethod:
    """The weights of a GGUF model. Each weight may be in a block format of its own.

    stored: names the format for logs
    tiled_heads: as in shared/gguf/translated.py
    """

    stored: StoredQuantization
    tiled_heads: TiledHeads | None = None

    @property
    def ignored(self) -> tuple[str, ...]:
        return ()

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> BlockWeight | None:
        if name not in tensors or tensors.format(name) in PLAIN:
            return None
        factor = name.removesuffix(WEIGHT) + ".scale"
        scaled = EXPERT.sub(FIRST_EXPERT, factor) in tensors  # the experts of a layer have factors, or none of them has
        columns = column_order(name, self.tiled_heads)
        return BlockWeight(name, shape, tensors.format(name), tensors, factor if scaled else "", columns)


def read(settings: Mapping[str, Any]) -> GgufMethod:
    heads = settings.get("tiled_heads")
    stored = StoredQuantization(str(settings["kind"]), activations="blocks")
    return GgufMethod(stored, heads and msgspec.convert(heads, TiledHeads))
