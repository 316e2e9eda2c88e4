"""Triton kernel for qkv_rope_write. One program norms and rotates some heads of one token, and writes them to q and the
cache.

It computes the same as the kernel of worker/ops/norm/triton.py and the two others here one after another, with their
roundings: a normed value is rounded to the dtype before it is rotated. No multiplication is fused into an addition, as
in worker/ops/norm/triton.py, so a head has the same bits whether or not qkv is split-K partial sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.launch_options import NO_OPTIONS, GpuOptions
from worker.ops.norm.triton import apply_weight
from worker.ops.triton_common import load_split_k, pdl_options, split_k_shape, start_dependent

ELEMENTS_PER_PROGRAM = 1024


@triton.jit
def _qkv_rope_write_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, v_weight_ptr, cos_ptr, sin_ptr, positions_ptr, slot_mapping_ptr,
    out_ptr, cache_k_ptr, cache_v_ptr,
    token_stride, partial_stride, q_heads, kv_heads, eps,
    SPLIT_K: tl.constexpr, VALUES: tl.constexpr, NORM: tl.constexpr, V_NORM: tl.constexpr,
    NORM_LAST: tl.constexpr, OFFSET: tl.constexpr,
    CLAMP: tl.constexpr,
    HEAD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_dependent(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    HALF: tl.constexpr = HEAD // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)[None, :]
    is_low_half = column < HALF
    partner_column = tl.where(is_low_half, column + HALF, column - HALF)  # the other element of the rotated pair
    is_q, is_k = head < q_heads, (head >= q_heads) & (head < q_heads + kv_heads)
    is_v = (head >= q_heads + kv_heads) & (head < q_heads + 2 * kv_heads) & VALUES
    in_head = column < HEAD
    mask = (is_q | is_k | is_v)[:, None] & in_head
    head_offsets = qkv_ptr + token * token_stride + head[:, None] * HEAD
    x = load_split_k(head_offsets + column, mask, partial_stride, dtype, SPLIT_K)  # [heads, D]
    unrotated, partner = x, load_split_k(head_offsets + partner_column, mask, partial_stride, dtype, SPLIT_K)
    if NORM and not NORM_LAST:
        x_fp32 = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x_fp32 * x_fp32, axis=1) / HEAD + eps)[:, None]
        weight = tl.load(q_weight_ptr + column, mask=in_head, other=0.0)
        weight_k = tl.load(k_weight_ptr + column, mask=in_head, other=0.0)
        x = apply_weight(x_fp32 * scale, tl.where(is_q[:, None], weight, weight_k), dtype, OFFSET)
        weight = tl.load(q_weight_ptr + partner_column, mask=in_head, other=0.0)
        weight_k = tl.load(k_weight_ptr + partner_column, mask=in_head, other=0.0)
        partner = apply_weight(partner.to(tl.float32) * scale, tl.where(is_q[:, None], weight, weight_k), dtype, OFFSET)
    if V_NORM:
        weight = tl.load(v_weight_ptr + column, mask=in_head, other=0.0)
        squares = unrotated.to(tl.float32) * unrotated.to(tl.float32)
        scale = tl.rsqrt(tl.sum(squares, axis=1) / HEAD + eps)[:, None]
        unrotated = apply_weight(unrotated.to(tl.float32) * scale, weight, dtype, OFFSET)
    table_offsets = tl.load(positions_ptr + token) * HEAD + column
    cos = tl.load(cos_ptr + table_offsets, mask=in_head, other=0.0)
    sin = tl.load(sin_ptr + table_offsets, mask=in_head, other=0.0)
    partner_sin = partner.to(tl.float32) * sin
    rotated = (x.to(tl.float32) * cos + tl.where(is_low_half, -partner_sin, partner_sin)).to(dtype)
    if NORM and NORM_LAST:
        x_fp32 = rotated.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x_fp32 * x_fp32, axis=1) / HEAD + eps)[:, None]
        weight = tl.load(q_weight_ptr + column, mask=in_head, other=0.0)
        weight_k = tl.load(k_weight_ptr + column, mask=in_head, other=0.0)
        rotated = apply_weight(x_fp32 * scale, tl.where(is_q[:, None], weight, weight_k), dtype, OFFSET)
    tl.store(out_ptr + (token * q_heads + head)[:, None] * HEAD + column, rotated, mask=is_q[:, None] & in_head)
    slot = tl.load(slot_mapping_ptr + token) * kv_heads - q_heads
    k_at = (slot + head)[:, None] * HEAD + column
    tl.store(cache_k_ptr + k_at, to_cache_dtype(rotated, cache_k_ptr, CLAMP), mask=is_k[:, None] & in_head)
    v_at = (slot - kv_heads + head)[:, None] * HEAD + column
    tl.store(cache_v_ptr + v_at, to_cache_dtype(unrotated, cache_v_ptr, CLAMP), mask=is_v[:, None] & in_head)


def qkv_rope_write_triton(
    qkv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    v_norm: Tensor | None = None,
    k_centre: None = None,
    eps: float,
    offset: bool,
    dtype: torch.dtype,
    norm_last: bool = False,
    options: GpuOptions = NO_OPTIONS,
) -> Tensor:
    tokens, width = qkv.shape[-2:]
    kv_heads, size = cache_k.shape[2:]
    written, values = kv_heads * (1 if cache_v is None else 2), cache_k if cache_v is None else cache_v
    q_heads = width // size - written
    split_k, partial_stride = split_k_shape(qkv, 2, dtype)
    assert (q_heads + written) * size == width and q_heads > 0 and size % 2 == 0 and qkv.stride(-1) == 1
    assert positions.shape == slot_mapping.shape == (tokens,)
    assert positions.is_contiguous() and slot_mapping.is_contiguous()
    assert positions.dtype == slot_mapping.dtype == torch.int64
    assert cos.shape == sin.shape and cos.shape[1] == size and cos.is_contiguous() and sin.is_contiguous()
    assert cos.dtype == sin.dtype == torch.float32 and (q_norm is None) == (k_norm is None)
    assert all(one is None or (one.shape == (size,) and one.is_contiguous()) for one in (q_norm, k_norm, v_norm))
    out = torch.empty(tokens, q_heads, size, dtype=dtype, device=qkv.device)
    block_d = triton.next_power_of_2(size)
    block_h = max(1, ELEMENTS_PER_PROGRAM // block_d)
    _qkv_rope_write_kernel[(tokens, -(-(q_heads + written) // block_h))](
        qkv, q_norm if q_norm is not None else out, k_norm if k_norm is not None else out,
        v_norm if v_norm is not None else out, cos, sin, positions, slot_mapping, out, cache_k, values,
        qkv.stride(-2), partial_stride, q_heads, kv_heads, eps,
        SPLIT_K=split_k, VALUES=cache_v is not None, NORM=q_norm is not None, V_NORM=v_norm is not None,
        NORM_LAST=norm_last, OFFSET=offset,
        CLAMP=check_caches(cache_k, values, dtype), HEAD=size, BLOCK_D=block_d, BLOCK_H=block_h,
        num_warps=4, enable_fp_fusion=False, **pdl_options(options),
    )  # fmt: skip
    return out


# Triton kernel for rotary embedding: one program rotates all query and key heads of one token.


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


# Triton kernel for store_kv. One program writes the keys and values of one token.


@triton.jit
def to_cache_dtype(x, cache_ptr, CLAMP: tl.constexpr):
    """Converts x to the cache's dtype. CLAMP: if true, x is first limited to float8_e4m3fn's range; NaN stays NaN"""
    if CLAMP:
        x_fp32 = x.to(tl.float32)
        x = tl.where(x_fp32 > 448.0, 448.0, tl.where(x_fp32 < -448.0, -448.0, x_fp32))
    return x.to(cache_ptr.dtype.element_ty)


@triton.jit
def _store_kv_kernel(
    k_ptr, v_ptr, cache_k_ptr, cache_v_ptr, slot_mapping_ptr, k_stride, v_stride,
    CLAMP: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < ROW
    target = tl.load(slot_mapping_ptr + token) * ROW + column
    k = tl.load(k_ptr + token * k_stride + column, mask=mask, other=0.0)
    v = tl.load(v_ptr + token * v_stride + column, mask=mask, other=0.0)
    tl.store(cache_k_ptr + target, to_cache_dtype(k, cache_k_ptr, CLAMP), mask=mask)
    tl.store(cache_v_ptr + target, to_cache_dtype(v, cache_v_ptr, CLAMP), mask=mask)


def check_caches(cache_k: Tensor, cache_v: Tensor, dtype: torch.dtype) -> bool:
    """Checks shapes and dtypes. Returns whether values must be clamped before the write, because caches are fp8."""
    assert cache_k.shape == cache_v.shape and cache_k.dtype == cache_v.dtype
    assert cache_k.dtype in (dtype, torch.float8_e4m3fn) and cache_k.is_contiguous() and cache_v.is_contiguous()
    return cache_k.dtype == torch.float8_e4m3fn


def store_kv_triton(k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, slot_mapping: Tensor) -> None:
    tokens, heads, size = k.shape
    assert v.shape == k.shape and v.dtype == k.dtype
    assert slot_mapping.shape == (tokens,) and slot_mapping.dtype == torch.int64
    assert k.stride()[1:] == v.stride()[1:] == (size, 1), "only whole tokens may be strided"
    assert cache_k.shape[2:] == (heads, size)
    row = heads * size
    _store_kv_kernel[(tokens,)](
        k, v, cache_k, cache_v, slot_mapping, k.stride(0), v.stride(0),
        CLAMP=check_caches(cache_k, cache_v, k.dtype), ROW=row, BLOCK=triton.next_power_of_2(row),
        enable_fp_fusion=False,
    )  # fmt: skip
