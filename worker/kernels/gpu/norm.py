"""The Triton kernel of norm.py: one program takes one row through everything, in one pass.

A row's bits must not depend on whether it came as terms, so the compiler may not fuse a product into a sum, and every
variant adds up the squares in the same layout: BLOCK and the warps follow from the row's size alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu.split_k import load_split_k, split_k_shape


@triton.jit
def normed(x, weight, size, eps, OFFSET: tl.constexpr):
    """x / rms(x) * weight of one row, zero beyond `size`; in x's dtype."""
    wide = x.to(tl.float32)
    return weighted(wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps), weight, x.dtype, OFFSET)


@triton.jit
def weighted(scaled, weight, dtype: tl.constexpr, OFFSET: tl.constexpr):
    """The two roundings of norm.py."""
    wide = weight.to(tl.float32)
    out = scaled * (1.0 + wide) if OFFSET else scaled.to(dtype).to(tl.float32) * wide
    return out.to(dtype)


@triton.jit
def _norm_kernel(
    x_ptr, x_norm_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr,
    token_stride, term_stride, heads, size, eps,
    TERMS: tl.constexpr, X_NORM: tl.constexpr, ADD: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    at = x_ptr + (row // heads) * token_stride + (row % heads) * size + columns
    x = load_split_k(at, inside, term_stride, dtype, TERMS)
    if X_NORM:
        x = normed(x, tl.load(x_norm_ptr + columns, mask=inside, other=0.0), size, eps, OFFSET)
    if ADD:
        residual = tl.load(residual_ptr + row * size + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row * size + columns, x, mask=inside)
    tl.store(out_ptr + row * size + columns, normed(x, weight, size, eps, OFFSET), mask=inside)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, *, offset: bool) -> Tensor:
    size = x.shape[-1]
    assert x.ndim in (2, 3) and x.stride(-1) == 1
    assert x.ndim == 2 or x.stride(1) == size, "only whole tokens may be strided"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, None, None, weight, out, None, 1, 0, x.shape[1] if x.ndim == 3 else 1, eps, offset)
    return out


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: bool, x_norm: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    terms, term_stride = split_k_shape(x, residual.ndim, residual.dtype)
    assert x.shape[-residual.ndim :] == residual.shape and residual.ndim in (2, 3)
    assert x.is_contiguous() and residual.is_contiguous()
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    heads = residual.shape[1] if residual.ndim == 3 else 1
    _launch(x, x_norm, residual, weight, out, total, terms, term_stride, heads, eps, offset)
    return out, total


def _launch(
    x: Tensor, x_norm: Tensor | None, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None,
    terms: int, term_stride: int, heads: int, eps: float, offset: bool,
) -> None:  # fmt: skip
    size = out.shape[-1]
    assert weight.shape == (size,) and weight.is_contiguous()
    assert x_norm is None or (x_norm.shape == (size,) and x_norm.is_contiguous())
    token_stride = x.stride(0) if terms == 1 else heads * size
    block = triton.next_power_of_2(size)
    _norm_kernel[(out.numel() // size,)](
        x, x_norm if x_norm is not None else weight, residual if residual is not None else out, weight,
        out, total if total is not None else out, token_stride, term_stride, heads, size, eps,
        TERMS=terms, X_NORM=x_norm is not None, ADD=residual is not None, OFFSET=offset, BLOCK=block,
        num_warps=min(8, max(1, block // 512)), enable_fp_fusion=False,
    )  # fmt: skip
