"""Triton kernel for rotary embedding: one program rotates all query and key heads of one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_heads(x_ptr, out_ptr, cos_low, cos_high, sin_low, sin_high, heads, head, column, HALF: tl.constexpr):
    """Rotates heads [heads, 2 * HALF] at x_ptr, contiguous: low' = low cos - high sin, high' = high cos + low sin."""
    mask = (head < heads)[:, None] & (column < HALF)[None, :]
    offsets = head[:, None] * (2 * HALF) + column[None, :]
    low = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    high = tl.load(x_ptr + offsets + HALF, mask=mask, other=0.0)
    low_fp32, high_fp32 = low.to(tl.float32), high.to(tl.float32)
    tl.store(out_ptr + offsets, (low_fp32 * cos_low - high_fp32 * sin_low).to(low.dtype), mask=mask)
    tl.store(out_ptr + offsets + HALF, (high_fp32 * cos_high + low_fp32 * sin_high).to(low.dtype), mask=mask)


@triton.jit
def _rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, q_out_ptr, k_out_ptr,
    q_stride, k_stride, q_heads, k_heads,
    HALF: tl.constexpr, BLOCK: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < HALF
    row = tl.load(positions_ptr + token) * (2 * HALF)
    cos_low = tl.load(cos_ptr + row + column, mask=mask, other=0.0)[None, :]
    cos_high = tl.load(cos_ptr + row + HALF + column, mask=mask, other=0.0)[None, :]
    sin_low = tl.load(sin_ptr + row + column, mask=mask, other=0.0)[None, :]
    sin_high = tl.load(sin_ptr + row + HALF + column, mask=mask, other=0.0)[None, :]
    _rotate_heads(
        q_ptr + token * q_stride, q_out_ptr + token * q_heads * (2 * HALF),
        cos_low, cos_high, sin_low, sin_high, q_heads, tl.arange(0, Q_BLOCK), column, HALF,
    )  # fmt: skip
    _rotate_heads(
        k_ptr + token * k_stride, k_out_ptr + token * k_heads * (2 * HALF),
        cos_low, cos_high, sin_low, sin_high, k_heads, tl.arange(0, K_BLOCK), column, HALF,
    )  # fmt: skip


def rotary_triton(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    tokens, q_heads, size = q.shape
    k_heads = k.shape[1]
    assert k.shape == (tokens, k_heads, size) and positions.shape == (tokens,) and size % 2 == 0
    assert q.stride()[1:] == k.stride()[1:] == (size, 1), "only whole tokens may be strided"
    assert cos.shape == sin.shape and cos.shape[1] == size and cos.is_contiguous() and sin.is_contiguous()
    assert cos.dtype == sin.dtype == torch.float32
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    _rotary_kernel[(tokens,)](
        q, k, cos, sin, positions, q_out, k_out, q.stride(0), k.stride(0), q_heads, k_heads,
        HALF=size // 2, BLOCK=triton.next_power_of_2(size // 2),
        Q_BLOCK=triton.next_power_of_2(q_heads), K_BLOCK=triton.next_power_of_2(k_heads), enable_fp_fusion=False,
    )  # fmt: skip
    return q_out, k_out
