"""Quantizes rows of keys and values to eight bits with a scale, as in the K/V cache on a CPU.

A row is one head of one token: D codes (int8 or e4m3), then their scale as a float32. An element is code * scale. The
scale maps the row's largest element to the largest code. The fp8 cache on a GPU has codes without a scale.
"""

import torch
from torch import Tensor

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
