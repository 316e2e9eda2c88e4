"""Quantizes rows of keys and values to eight bits with a scale, as in the K/V cache on a CPU.

A row is one head of one token: D codes (int8 or e4m3), then their scale as a float32. An element is code * scale. The
scale maps the row's largest element to the largest code. The fp8 cache on a GPU has codes without a scale.
"""

import torch
from torch import Tensor

from worker.ops.linear.native import PANEL
from worker.ops.native import (
    MAX_HEAD_DIM,
    MAX_KEY_ELEMENTS,
    address,
    available,
    multiplies_bf16,
)

SCALE_BYTES = 4
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # dtype of the codes → the largest code
TINY_ROW = 1e-30  # if a row's largest element is smaller, the row becomes zeros


def row_elements(head_dim: int, dtype: torch.dtype, device: torch.device | str) -> int:
    """Returns the length of a cached row, in elements of the cache's `dtype`."""
    return head_dim + SCALE_BYTES if dtype in LARGEST and torch.device(device).type == "cpu" else head_dim


def has_scales(cache: Tensor, head_dim: int) -> bool:
    """Returns whether each row of `cache` [..., D or D + 4] ends with its scale."""
    return cache.dtype in LARGEST and cache.shape[-1] == head_dim + SCALE_BYTES


def quantize_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantizes rows x [..., D] to codes of `dtype`, rounded to nearest even. Returns bytes [..., D + 4]."""
    largest = x.float().abs().amax(-1, keepdim=True)
    # a tensor, because torch would divide a Python number by multiplying it with the reciprocal, which rounds
    # differently
    limit = torch.full_like(largest, LARGEST[dtype])
    tiny = largest < TINY_ROW
    codes = (x.float() * torch.where(tiny, 0.0, limit / largest)).clamp(-limit, limit)
    if dtype == torch.int8:
        codes = codes.round()
    scale = torch.where(tiny, 0.0, largest / limit)
    return torch.cat((codes.to(dtype).view(torch.uint8), scale.view(torch.uint8)), -1)


def dequantize_rows(rows: Tensor, codes: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Returns the elements [..., D] in `dtype`. rows: bytes [..., D + 4]; codes: the dtype of their codes"""
    values = rows[..., :-SCALE_BYTES].view(codes).float()
    scales = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)  # the copy is aligned for float32
    return (values * scales.view(torch.float32)).to(dtype)


PLAIN, PAIRED = 0, 1  # formats of the K/V cache, with the numbers of csrc/kv_format.h
EIGHT_BITS = {torch.int8: 2, torch.float8_e4m3fn: 3}  # two more formats of the K/V cache: those with 8-bit codes


def v_is_paired(cache_v: Tensor) -> bool:
    """Returns whether values of two consecutive tokens are stored interleaved: [pages, page_size / 2, Hk, D, 2] in
    memory.

    Then bf16 kernels multiply by values directly from the cache. This is possible only if pages consist of whole AMX
    tiles. Keys are never interleaved.
    """
    page_size, d = cache_v.shape[1], cache_v.shape[3]
    return cache_v.dtype == torch.bfloat16 and multiplies_bf16() and page_size % PANEL == 0 and d % PANEL == 0


def supports_cache(dtype: torch.dtype, cache: Tensor, head_dim: int) -> bool:
    """Returns whether the library reads and writes `cache` [..., D, or D + 4 in eight bits] for keys and values of
    `dtype`.
    """
    if not available(dtype) or head_dim > MAX_HEAD_DIM or cache.shape[-2] * head_dim > MAX_KEY_ELEMENTS:
        return False
    return cache.dtype == dtype or has_scales(cache, head_dim)


def kv_format(cache_k: Tensor, cache_v: Tensor) -> int:
    """Returns the library's number for the format of a cache. The library must support the cache.

    Values are not interleaved if they are the keys, in the same memory.
    """
    paired = cache_k.data_ptr() != cache_v.data_ptr() and v_is_paired(cache_v)
    return EIGHT_BITS.get(cache_v.dtype, PAIRED if paired else PLAIN)


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
    assert cache_k.shape == cache_v.shape and cache_k.dtype == cache_v.dtype and supports_cache(dtype, cache_k, d)
    assert cache_k.shape[2] == heads and (has_scales(cache_k, d) or cache_k.shape[3] == d)
    assert cache_k.is_contiguous() and cache_v.is_contiguous()


def check_tables(cos: Tensor, sin: Tensor, positions: Tensor, t: int, d: int) -> None:
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == sin.shape and cos.shape[1] == d and d % 2 == 0
    assert cos.is_contiguous() and sin.is_contiguous()
    assert positions.dtype == torch.int64 and positions.shape == (t,) and positions.is_contiguous()
