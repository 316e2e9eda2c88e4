"""Computes the norm of the last dimension, alone or after adding the residual.

If the weight is a vector [H], the norm is an RMS norm. If the weight is [2, H], the norm is a layer norm: it subtracts
the mean first, and the second row of the weight is its bias.

Model families round in two ways. Llama and Qwen round the normalized value before they multiply it by the weight.
Gemma (`offset`) multiplies by `1 + weight` in fp32 and rounds once. `1 + weight` is never stored, because bf16 would
lose bits. Layer norms multiply and add in fp32 and round once.
"""

import torch
from torch import Tensor


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float, *, offset: bool = False) -> Tensor:
    """Returns x / rms(x) * weight over the last dimension, computed in fp32, or the layer norm if weight is [2, H].

    x [T, H] or [T, heads, D], whose rows may be strided; weight [H] or [D]. The result is contiguous, of x's shape and
    dtype. offset: if true, an RMS norm multiplies by 1 + weight; layer norms ignore it
    """
    x_fp32 = x.float()
    if weight.ndim == 2:
        centred = x_fp32 - x_fp32.mean(-1, keepdim=True)
        normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        return (normed * weight[0].float() + weight[1].float()).to(x.dtype)
    normed = x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


def add_rms_norm_torch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: bool = False,
    x_norm: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(s), s) with s = scale * x + residual, rounded to the dtype first, as in Hugging Face models.

    x [T, H], or its split-K partial sums (see sum_split_k); residual [T, H]; weight [H], or [2, H] for a layer norm;
    None: there is no norm, and both results are s. x_norm: the weight of a norm that is applied to x first; None: no
    such norm
    """
    x = sum_split_k(x, residual.ndim, residual.dtype)
    x = x if x_norm is None else rms_norm_torch(x, x_norm, eps, offset=offset)
    total = (x.float() * scale + residual.float()).to(residual.dtype)
    return total if weight is None else rms_norm_torch(total, weight, eps, offset=offset), total


# Defines the partial sums of a split-K matrix product, which the next kernel adds up while it reads them.
#
# On a GPU, a matrix product with few columns keeps all multiprocessors busy only if several of them share a column,
# each with a part of K. Adding up their sums would take another kernel. So `linear` may return partial sums, and the
# norms and `qkv_rope_write` accept partial sums as well as a plain result.


def sum_split_k(x: Tensor, dims: int, dtype: torch.dtype) -> Tensor:
    """Returns a matrix product: x itself if x has `dims` dimensions, else the sum of the partial sums in x.

    x: [...] in `dtype`, or partial sums [S, ...] in float32, which are added in order and then rounded to `dtype` once
    """
    if x.ndim == dims:
        return x
    total = x[0]
    for partial in x[1:]:
        total = total + partial
    return total.to(dtype)
