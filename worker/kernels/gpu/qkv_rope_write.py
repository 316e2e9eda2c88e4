"""The Triton kernel of heads.py: one program takes some heads of one token from the projection to where they are read.

It computes what norm_triton, rotary_triton and write_triton compute one after the other, with their roundings: the
normed value becomes the dtype before it is turned. As in norm_triton, no product is fused into a sum, so that a head
has the same bits whether it came as terms or not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu.norm import weighted
from worker.kernels.gpu.split_k import load_split_k, split_k_shape
from worker.kernels.gpu.store_kv import as_kept, check_caches

LANES = 1024  # elements of one program


@triton.jit
def _heads_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr, slot_mapping_ptr,
    out_ptr, cache_k_ptr, cache_v_ptr,
    token_stride, term_stride, q_heads, kv_heads, eps,
    TERMS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, CLAMP: tl.constexpr,
    HEAD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    HALF: tl.constexpr = HEAD // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)[None, :]
    low = column < HALF
    across = tl.where(low, column + HALF, column - HALF)  # the other member of each pair
    is_q, is_k = head < q_heads, (head >= q_heads) & (head < q_heads + kv_heads)
    is_v = (head >= q_heads + kv_heads) & (head < q_heads + 2 * kv_heads)
    real = column < HEAD
    inside = (is_q | is_k | is_v)[:, None] & real
    at = qkv_ptr + token * token_stride + head[:, None] * HEAD
    x = load_split_k(at + column, inside, term_stride, dtype, TERMS)  # [heads, D]
    plain, other = x, load_split_k(at + across, inside, term_stride, dtype, TERMS)
    if NORM:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / HEAD + eps)[:, None]
        weight = tl.load(q_weight_ptr + column, mask=real, other=0.0)
        weight_k = tl.load(k_weight_ptr + column, mask=real, other=0.0)
        x = weighted(wide * scale, tl.where(is_q[:, None], weight, weight_k), dtype, OFFSET)
        weight = tl.load(q_weight_ptr + across, mask=real, other=0.0)
        weight_k = tl.load(k_weight_ptr + across, mask=real, other=0.0)
        other = weighted(other.to(tl.float32) * scale, tl.where(is_q[:, None], weight, weight_k), dtype, OFFSET)
    turn = tl.load(positions_ptr + token) * HEAD + column
    cos = tl.load(cos_ptr + turn, mask=real, other=0.0)
    sin = tl.load(sin_ptr + turn, mask=real, other=0.0)
    aside = other.to(tl.float32) * sin
    turned = (x.to(tl.float32) * cos + tl.where(low, -aside, aside)).to(dtype)
    tl.store(out_ptr + (token * q_heads + head)[:, None] * HEAD + column, turned, mask=is_q[:, None] & real)
    slot = tl.load(slot_mapping_ptr + token) * kv_heads - q_heads
    k_at = (slot + head)[:, None] * HEAD + column
    tl.store(cache_k_ptr + k_at, as_kept(turned, cache_k_ptr, CLAMP), mask=is_k[:, None] & real)
    v_at = (slot - kv_heads + head)[:, None] * HEAD + column
    tl.store(cache_v_ptr + v_at, as_kept(plain, cache_v_ptr, CLAMP), mask=is_v[:, None] & real)


def qkv_rope_write_triton(
    qkv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: bool,
    dtype: torch.dtype,
) -> Tensor:
    tokens, width = qkv.shape[-2:]
    kv_heads, size = cache_k.shape[2:]
    q_heads = width // size - 2 * kv_heads
    terms, term_stride = split_k_shape(qkv, 2, dtype)
    assert (q_heads + 2 * kv_heads) * size == width and q_heads > 0 and size % 2 == 0 and qkv.stride(-1) == 1
    assert positions.shape == slot_mapping.shape == (tokens,)
    assert positions.is_contiguous() and slot_mapping.is_contiguous()
    assert positions.dtype == slot_mapping.dtype == torch.int64
    assert cos.shape == sin.shape and cos.shape[1] == size and cos.is_contiguous() and sin.is_contiguous()
    assert cos.dtype == sin.dtype == torch.float32 and (q_norm is None) == (k_norm is None)
    assert all(one is None or (one.shape == (size,) and one.is_contiguous()) for one in (q_norm, k_norm))
    out = torch.empty(tokens, q_heads, size, dtype=dtype, device=qkv.device)
    block_d = triton.next_power_of_2(size)
    block_h = max(1, LANES // block_d)
    _heads_kernel[(tokens, -(-(q_heads + 2 * kv_heads) // block_h))](
        qkv, q_norm if q_norm is not None else out, k_norm if k_norm is not None else out,
        cos, sin, positions, slot_mapping, out, cache_k, cache_v,
        qkv.stride(-2), term_stride, q_heads, kv_heads, eps,
        TERMS=terms, NORM=q_norm is not None, OFFSET=offset, CLAMP=check_caches(cache_k, cache_v, dtype),
        HEAD=size, BLOCK_D=block_d, BLOCK_H=block_h, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
