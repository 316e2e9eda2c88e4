"""Unpacks GGUF's block formats with fewer than three bits or with grids, and NVFP4.

The formats IQ1, IQ2 and IQ3 have a grid: a table of entries of four or eight numbers. A block has indices of entries,
signs and scales. A grid has two to eight different numbers. With its sign, each number of a weight is one of at most 16
values, so it becomes a code of four bits without loss. The lower three bits of a code are the number's index in
ascending order, the highest bit is the sign. TQ1_0 and TQ2_0 have the numbers -1, 0 and 1.

All functions take the bytes of blocks as uint8 [n, bytes of a block] on any device.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from shared.gguf.grids import grid
from worker.ops.block_rows import Parts
from worker.ops.quantized_weight import NEGATIVE

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
