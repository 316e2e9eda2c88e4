"""Triton kernel for RMS norm and layer norm. One program computes one row in one pass.

The bits of a row must not depend on whether x is split-K partial sums. So the compiler must not fuse a multiplication
into an addition, and all variants add the squares in the same order: BLOCK and the number of warps depend only on the
size of a row.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.launch_options import NO_OPTIONS, GpuOptions
from worker.ops.triton_common import NO_MODIFIER, load_split_k, pdl_options, split_k_shape, start_dependent


@triton.jit
def rms_norm_row(x, weight, size, eps, OFFSET: tl.constexpr):
    """Returns x / rms(x) * weight for one row, in x's dtype. x: zero from index `size` on"""
    x_fp32 = x.to(tl.float32)
    return apply_weight(x_fp32 * tl.rsqrt(tl.sum(x_fp32 * x_fp32, axis=0) / size + eps), weight, x.dtype, OFFSET)


@triton.jit
def layer_norm_row(x, weight_ptr, columns, size, eps):
    """Returns the layer norm of one row, in x's dtype. weight_ptr: the weight [size], then the bias [size]"""
    mask = columns < size
    x_fp32 = x.to(tl.float32)
    centred = tl.where(mask, x_fp32 - tl.sum(x_fp32, axis=0) / size, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(weight_ptr + size + columns, mask=mask, other=0.0).to(tl.float32)
    return (normed * weight + bias).to(x.dtype)


@triton.jit
def norm_row(x, weight_ptr, columns, size, eps, OFFSET: tl.constexpr, LAYER: tl.constexpr):
    if LAYER:
        return layer_norm_row(x, weight_ptr, columns, size, eps)
    weight = tl.load(weight_ptr + columns, mask=columns < size, other=0.0)
    return rms_norm_row(x, weight, size, eps, OFFSET)


@triton.jit
def apply_weight(scaled, weight, dtype: tl.constexpr, OFFSET: tl.constexpr):
    """Multiplies by the weight, and rounds in one of the two ways that worker/ops/norm/reference.py describes."""
    weight_fp32 = weight.to(tl.float32)
    out = scaled * (1.0 + weight_fp32) if OFFSET else scaled.to(dtype).to(tl.float32) * weight_fp32
    return out.to(dtype)


@triton.jit
def add_norm_row(
    x_ptr, x_norm_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, row, partial_stride, size, eps, scale,
    SPLIT_K: tl.constexpr, X_NORM: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    LAYER: tl.constexpr, BLOCK: tl.constexpr, CACHE: tl.constexpr = NO_MODIFIER,
):  # fmt: skip
    """Computes sum and norm of one row. x_ptr: the row's first element; CACHE: how x is loaded (see load_split_k)"""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    x = load_split_k(x_ptr + columns, mask, partial_stride, dtype, SPLIT_K, CACHE)
    if X_NORM:
        x = norm_row(x, x_norm_ptr, columns, size, eps, OFFSET, LAYER)
    if ADD:
        residual = tl.load(residual_ptr + row * size + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) * scale + residual.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row * size + columns, x, mask=mask)
    if NORM:
        normed = norm_row(x, weight_ptr, columns, size, eps, OFFSET, LAYER)
        tl.store(out_ptr + row * size + columns, normed, mask=mask)


@triton.jit
def _rms_norm_kernel(
    x_ptr, x_norm_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr,
    token_stride, partial_stride, heads, size, eps, scale,
    SPLIT_K: tl.constexpr, X_NORM: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    LAYER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    add_norm_row(
        x_ptr + (row // heads) * token_stride + (row % heads) * size, x_norm_ptr, residual_ptr, weight_ptr, out_ptr,
        sum_ptr, row, partial_stride, size, eps, scale, SPLIT_K, X_NORM, ADD, NORM, OFFSET, LAYER, BLOCK,
    )  # fmt: skip


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, *, offset: bool = False, options: GpuOptions = NO_OPTIONS
) -> Tensor:
    size = x.shape[-1]
    assert x.ndim in (2, 3) and x.stride(-1) == 1
    assert x.ndim == 2 or x.stride(1) == size, "only whole tokens may be strided"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, None, None, weight, out, None, 1, 0, x.shape[1] if x.ndim == 3 else 1, eps, offset, 1.0, options)
    return out


def add_rms_norm_triton(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: bool = False,
    x_norm: Tensor | None = None,
    scale: float = 1.0,
    options: GpuOptions = NO_OPTIONS,
) -> tuple[Tensor, Tensor]:
    split_k, partial_stride = split_k_shape(x, residual.ndim, residual.dtype)
    assert x.shape[-residual.ndim :] == residual.shape and residual.ndim in (2, 3)
    assert x.is_contiguous() and residual.is_contiguous()
    total = torch.empty_like(residual)
    out = total if weight is None else torch.empty_like(residual)
    heads = residual.shape[1] if residual.ndim == 3 else 1
    _launch(x, x_norm, residual, weight, out, total, split_k, partial_stride, heads, eps, offset, scale, options)
    return out, total


def _launch(
    x: Tensor, x_norm: Tensor | None, residual: Tensor | None, weight: Tensor | None, out: Tensor,
    total: Tensor | None, split_k: int, partial_stride: int, heads: int, eps: float, offset: bool, scale: float,
    options: GpuOptions,
) -> None:  # fmt: skip
    size = out.shape[-1]
    token_stride = x.stride(0) if split_k == 1 else heads * size
    _rms_norm_kernel[(out.numel() // size,)](
        x, x_norm if x_norm is not None else out, residual if residual is not None else out,
        weight if weight is not None else out, out, total if total is not None else out,
        token_stride, partial_stride, heads, size, eps, scale,
        SPLIT_K=split_k, ADD=residual is not None, **norm_options(size, weight, x_norm, offset=offset),
        **pdl_options(options),
    )  # fmt: skip


def norm_options(size: int, weight: Tensor | None, x_norm: Tensor | None, *, offset: bool) -> dict[str, Any]:
    """Returns the constants and launch options of a kernel that norms rows of `size` elements."""
    weights = [one for one in (weight, x_norm) if one is not None]
    layer = any(one.ndim == 2 for one in weights)
    assert all(one.shape == ((2, size) if layer else (size,)) and one.is_contiguous() for one in weights)
    block = triton.next_power_of_2(size)
    return {
        "X_NORM": x_norm is not None, "NORM": weight is not None, "OFFSET": offset, "LAYER": layer, "BLOCK": block,
        "num_warps": norm_warps(size), "enable_fp_fusion": False,
    }  # fmt: skip


def norm_warps(size: int) -> int:
    return min(8, max(1, triton.next_power_of_2(size) // 512))
