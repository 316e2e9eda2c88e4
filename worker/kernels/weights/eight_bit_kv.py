"""Rows of keys and values in eight bits with a scale, as the K/V cache of the CPU holds them.

A row is one head of one token: D codes, int8 or e4m3, then their scale as a float32. Its elements are code * scale, and
the scale maps the row's largest element to the largest code. A GPU's fp8 cache has codes without a scale.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest code by the dtype of the codes
TINY_ROW = 1e-30  # a row whose largest element is smaller becomes zeros


def row_elements(head_dim: int, dtype: torch.dtype, device: torch.device | str) -> int:
    """Returns the length of a cached row, in elements of the cache's `dtype`."""
    return head_dim + SCALE_BYTES if dtype in LARGEST and torch.device(device).type == "cpu" else head_dim


def has_scales(cache: Tensor, head_dim: int) -> bool:
    """Whether the rows of `cache` [..., D or D + 4] end with their scales."""
    return cache.dtype in LARGEST and cache.shape[-1] == head_dim + SCALE_BYTES


def quantize_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns rows x [..., D] as codes of `dtype`, rounded to nearest even, and their scales: bytes [..., D + 4]."""
    largest = x.float().abs().amax(-1, keepdim=True)
    limit = torch.full_like(largest, LARGEST[dtype])  # torch divides a plain number by multiplying with the reciprocal
    tiny = largest < TINY_ROW
    codes = (x.float() * torch.where(tiny, 0.0, limit / largest)).clamp(-limit, limit)
    if dtype == torch.int8:
        codes = codes.round()
    scale = torch.where(tiny, 0.0, largest / limit)
    return torch.cat((codes.to(dtype).view(torch.uint8), scale.view(torch.uint8)), -1)


def dequantize_rows(rows: Tensor, codes: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Returns the elements [..., D] of rows [..., D + 4] bytes, whose codes are of dtype `codes`, in `dtype`."""
    values = rows[..., :-SCALE_BYTES].view(codes).float()
    scales = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)  # aligned, too
    return (values * scales.view(torch.float32)).to(dtype)
