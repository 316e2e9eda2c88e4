"""Triton kernel for store_kv. One program writes the keys and values of one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor


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
