"""Calls the norms of the C library (csrc/norm.c)."""

import torch
from torch import Tensor

from worker.ops.native import address, contiguous_heads, kernels

HEADS, WHOLE, ROTATED_HEADS = 0, 1, 2  # which elements one norm of queries or keys covers (rope.c)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: bool = False) -> Tensor:
    """Computes the same as `rms_norm_torch`, for x [T, H] or [T, heads, D]."""
    x, heads, n = contiguous_heads(x)
    _check_norm(weight, x)
    out = torch.empty(x.shape, dtype=x.dtype)
    getattr(kernels()[x.dtype], norm_kind(weight))(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], heads, n, x.stride(0), eps, offset,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: bool = False, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Computes the same as `add_rms_norm_torch`: (rms_norm(s), s) with s = scale * x + residual, rounded to the dtype.

    x, residual [T, H] contiguous. Without a weight, both results are s.
    """
    assert x.is_contiguous() and residual.is_contiguous() and x.shape == residual.shape and x.ndim == 2
    assert x.dtype == residual.dtype
    if weight is not None:
        _check_norm(weight, x)
    out, total = torch.empty_like(x), torch.empty_like(x)
    getattr(kernels()[x.dtype], f"add_{norm_kind(weight)}")(
        x.data_ptr(), residual.data_ptr(), address(weight), out.data_ptr(), total.data_ptr(),
        x.shape[0], x.shape[1], eps, offset, scale, torch.get_num_threads(),
    )  # fmt: skip
    return out, total


def norm_kind(weight: Tensor | None) -> str:
    """Returns the name of the C function for a norm with this weight."""
    return "layer_norm" if weight is not None and weight.ndim == 2 else "rms_norm"


def _check_norm(weight: Tensor, x: Tensor) -> None:
    size = x.shape[-1]
    assert weight.dtype == x.dtype and weight.shape in ((size,), (2, size)) and weight.is_contiguous()
