"""Quantizes rows of keys and values to eight or four bits with a scale, as in the K/V cache on a CPU.

A row is one head of one token. In eight bits, it is D codes (int8 or e4m3), then their scale as a float32. An element
is code * scale. The scale maps the row's largest element to the largest code. The fp8 cache on a GPU has codes without
a scale.

The elements of int8 and of four bits are those after a rotation by a Hadamard matrix, which spreads large elements over
all of them. Some models have keys with a few elements that are much larger than the others, to which codes of the
row itself would leave few steps. Attention rotates its queries, too, and rotates its result back.

In four bits, a row is D codes from -8 to 7, two in a byte; then a multiplier from -15 to 15 for each GROUP elements,
one byte; then the scale. An element is code * multiplier * scale, where code * multiplier is a code of int8, so
attention computes with it as with int8. Only values are kept in four bits, with keys in int8: keys with a few large
elements lose much with four bits, rotated or not.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.native import (
    MAX_HEAD_DIM,
    MAX_KEY_ELEMENTS,
    PANEL,
    address,
    available,
    multiplies_bf16,
    tier,
)

SCALE_BYTES = 4
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # dtype of the codes → the largest code
FOUR_BITS = torch.uint8  # the dtype of rows in four bits, and of a cache whose values are such rows
GROUP = 32  # elements of a row in four bits that share a multiplier
LEAST, MOST = -8.0, 7.0  # codes of four bits
MOST_MULTIPLIER = 15.0  # multipliers may be negative
TRIED_MULTIPLIERS = 4  # how many are tried for a group, with both signs
CODED = (*LARGEST, FOUR_BITS)
ROTATED = (torch.int8, FOUR_BITS)
TINY_ROW = 1e-30  # if a row's largest element is smaller, the row becomes zeros


def row_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtypes of the rows of keys and of values. dtype: that of the cache"""
    return (torch.int8, FOUR_BITS) if dtype == FOUR_BITS else (dtype, dtype)


def name_of(dtype: torch.dtype, centred_over: int) -> str:
    """Returns the name of a cache's format.

    dtype: that of the cache; centred_over: of how many positions the keys in int8 have their centre; 0: they have none
    """
    if dtype not in ROTATED:
        return str(dtype)
    centred = f" centred over {centred_over} positions" if centred_over else ""
    if dtype == FOUR_BITS:
        return f"rotated int8 keys{centred}, rotated int4 values in groups of {GROUP}"
    return f"rotated int8, keys{centred}" if centred_over else "rotated int8"


def row_elements(head_dim: int, dtype: torch.dtype, device: torch.device | str) -> int:
    """Returns the length of a cached row, in elements of the row's `dtype`."""
    if dtype not in CODED or torch.device(device).type != "cpu":
        return head_dim
    codes = (head_dim + 1) // 2 + -(-head_dim // GROUP) if dtype == FOUR_BITS else head_dim
    return codes + SCALE_BYTES


def has_scales(cache: Tensor, head_dim: int) -> bool:
    """Returns whether each row of `cache` [..., D or as row_elements says] ends with its scale."""
    return cache.dtype in CODED and cache.shape[-1] == row_elements(head_dim, cache.dtype, "cpu")


def keys_are_rotated(cache_k: Tensor) -> bool:
    """Returns whether the cache has keys in rotated int8, which may have a centre."""
    return cache_k.dtype == torch.int8


def quantize_rows(x: Tensor, dtype: torch.dtype, centre: Tensor | None = None) -> Tensor:
    """Quantizes rows x [..., D] to codes of `dtype`, rounded to nearest even.

    centre [..., D] float32: is subtracted from the rows first, in int8
    Returns bytes [..., D + 4], in four bits as row_elements says.
    """
    if dtype == FOUR_BITS:
        return _quantize_to_four_bits(x)
    wide = x.float() if centre is None else x.float() - centre
    wide = _rotate(wide) if dtype in ROTATED else wide
    largest = wide.abs().amax(-1, keepdim=True)
    # a tensor, because torch would divide a Python number by multiplying it with the reciprocal, which rounds
    # differently
    limit = torch.full_like(largest, LARGEST[dtype])
    tiny = largest < TINY_ROW
    codes = (wide * torch.where(tiny, 0.0, limit / largest)).clamp(-limit, limit)
    if dtype == torch.int8:
        codes = codes.round()
    scale = torch.where(tiny, 0.0, largest / limit)
    return torch.cat((codes.to(dtype).view(torch.uint8), scale.view(torch.uint8)), -1)


def _quantize_to_four_bits(x: Tensor) -> Tensor:
    d, rotated = x.shape[-1], _rotate(x)
    largest = rotated.abs().amax(-1, keepdim=True)
    most = torch.full_like(largest, -LEAST * MOST_MULTIPLIER)  # a tensor, as in quantize_rows
    tiny = largest < TINY_ROW
    whole = (rotated * torch.where(tiny, 0.0, most / largest)).clamp(-most, most).round().nan_to_num()
    codes, multipliers = _quantize_groups(F.pad(whole, (0, -d % GROUP)).unflatten(-1, (-1, GROUP)))
    nibbles = F.pad(codes.flatten(-2)[..., :d], (0, d % 2)).to(torch.int8).view(torch.uint8) & 15
    packed = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    kept = torch.where(tiny, 0.0, multipliers).to(torch.int8).view(torch.uint8)
    scale = torch.where(tiny, 0.0, largest / most)
    return torch.cat((packed, kept, scale.view(torch.uint8)), -1)


def _quantize_groups(v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes [..., groups, GROUP] of integers v of the same shape, and the multipliers [..., groups].

    The multiplier of a group has the smallest error of those tried: the smallest that limits no element, and some below
    it, with both signs.
    """
    magnitudes = v.abs().amax(-1, keepdim=True)
    first = (magnitudes / torch.full_like(magnitudes, MOST)).ceil().clamp(1.0, MOST_MULTIPLIER)
    least, codes, multipliers = torch.full_like(first, torch.inf), v, first
    for number in range(2 * TRIED_MULTIPLIERS):
        multiplier = (first - number // 2).clamp(min=1.0) * (-1.0) ** number
        own = (v * (torch.ones_like(multiplier) / multiplier)).clamp(LEAST, MOST).round()
        error = (v - own * multiplier).square().sum(-1, keepdim=True)
        better = error < least
        least, codes = torch.where(better, error, least), torch.where(better, own, codes)
        multipliers = torch.where(better, multiplier, multipliers)
    return codes, multipliers[..., 0]


def _rotate(x: Tensor) -> Tensor:
    """Returns rows x [..., D] as they are kept: _rotate_blocks makes them x again."""
    d = x.shape[-1]
    return _rotate_blocks(x.float() * (1 / (d & -d)))  # a power of two


def _rotate_blocks(x: Tensor) -> Tensor:
    """Multiplies each block of rows x [..., D] by a Hadamard matrix, as rotate_blocks in csrc/kv_format.h: in the same
    order of additions. A block is as long as the largest power of two that divides D.
    """
    half = 1
    while half < x.shape[-1] & -x.shape[-1]:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x, half = torch.stack((a + b, a - b), -2).flatten(-3), 2 * half
    return x


def dequantize_rows(rows: Tensor, codes: torch.dtype, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Returns the elements [..., D] in `dtype`. rows: bytes as quantize_rows returns them; codes: the dtype of their
    codes; head_dim: D
    """
    in_four = codes == FOUR_BITS
    values = _codes_of_eight_bits(rows, head_dim) if in_four else rows[..., :-SCALE_BYTES].view(codes).float()
    scales = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)  # the copy is aligned for float32
    wide = values * scales.view(torch.float32)
    return (_rotate_blocks(wide) if codes in ROTATED else wide).to(dtype)


def _codes_of_eight_bits(rows: Tensor, d: int) -> Tensor:
    """Returns code * multiplier of rows in four bits, as float32 [..., D]."""
    packed, multipliers = rows[..., : (d + 1) // 2], rows[..., (d + 1) // 2 : -SCALE_BYTES]
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :d].float()
    codes = torch.where(nibbles > MOST, nibbles - 16, nibbles)
    return codes * multipliers.view(torch.int8).float().repeat_interleave(GROUP, -1)[..., :d]


PLAIN, PAIRED, TRANSPOSED = range(3)  # formats of the K/V cache, with the numbers of csrc/kv_format.h
WITH_CODES = {torch.int8: 3, torch.float8_e4m3fn: 4, FOUR_BITS: 5}  # dtype of values → more formats of the K/V cache


def v_is_paired(cache_v: Tensor) -> bool:
    """Returns whether values of two consecutive tokens are stored interleaved: [pages, page_size / 2, Hk, D, 2] in
    memory.

    Then bf16 kernels multiply by values directly from the cache. This is possible only if pages consist of whole AMX
    tiles.
    """
    page_size, d = cache_v.shape[1], cache_v.shape[3]
    return cache_v.dtype == torch.bfloat16 and multiplies_bf16() and page_size % PANEL == 0 and d % PANEL == 0


def k_is_transposed(cache_v: Tensor) -> bool:
    """Returns whether keys of 32 consecutive tokens are stored transposed: [pages, page_size / 32, Hk, D / 2, 32, 2] in
    memory.

    Then the kernel that multiplies queries by 16 keys at once reads keys directly from the cache. AMX multiplies by
    keys as they are.
    """
    return v_is_paired(cache_v) and tier() != "amx"


def supports_cache(dtype: torch.dtype, cache: Tensor, head_dim: int) -> bool:
    """Returns whether the library reads and writes a cache for keys and values of `dtype`.

    cache: its keys [..., D, or D + 4 in eight bits]
    """
    if not available(dtype) or head_dim > MAX_HEAD_DIM or cache.shape[-2] * head_dim > MAX_KEY_ELEMENTS:
        return False
    return cache.dtype == dtype or has_scales(cache, head_dim)


def kv_format(cache_k: Tensor, cache_v: Tensor) -> int:
    """Returns the library's number for the format of a cache. The library must support the cache.

    Nothing is interleaved or transposed if the values are the keys, in the same memory.
    """
    if cache_v.dtype in WITH_CODES:
        return WITH_CODES[cache_v.dtype]
    if cache_k.data_ptr() == cache_v.data_ptr() or not v_is_paired(cache_v):
        return PLAIN
    return TRANSPOSED if k_is_transposed(cache_v) else PAIRED


def rows_visible(bidirectional_end: Tensor | None, rows: int) -> int | None:
    """Returns the address of bidirectional_end [rows] int32, or None. bidirectional_end: as in attention_torch"""
    if bidirectional_end is not None:
        assert (
            bidirectional_end.dtype == torch.int32
            and bidirectional_end.shape == (rows,)
            and bidirectional_end.is_contiguous()
        )
    return address(bidirectional_end)


def check_cache(cache_k: Tensor, cache_v: Tensor, dtype: torch.dtype, heads: int, d: int) -> None:
    assert cache_k.shape[:3] == cache_v.shape[:3] and cache_k.shape[2] == heads and supports_cache(dtype, cache_k, d)
    assert (cache_k.dtype, cache_v.dtype) == row_dtypes(cache_v.dtype)
    for cache in (cache_k, cache_v):
        assert has_scales(cache, d) or (cache.dtype == dtype and cache.shape[3] == d)
    assert cache_k.is_contiguous() and cache_v.is_contiguous()


def check_centre(k_centre: Tensor | None, cache_k: Tensor, heads: int, d: int) -> None:
    assert k_centre is None or (k_centre.shape == (heads, d) and k_centre.dtype == torch.float32)
    assert k_centre is None or (k_centre.is_contiguous() and keys_are_rotated(cache_k))


def check_tables(cos: Tensor, sin: Tensor, positions: Tensor, t: int, d: int) -> None:
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == sin.shape and cos.shape[1] == d and d % 2 == 0
    assert cos.is_contiguous() and sin.is_contiguous()
    assert positions.dtype == torch.int64 and positions.shape == (t,) and positions.is_contiguous()
