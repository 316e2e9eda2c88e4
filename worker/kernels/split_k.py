"""Partial sums of a split-K product, which the next kernel adds as it reads them.

On a GPU a narrow product keeps all multiprocessors busy only if several of them share a column, each with a part of K.
Adding their sums would take another kernel. So `linear` may return partial sums, and the norms and `qkv_rope_write`
accept both.
"""

import torch
from torch import Tensor


def sum_split_k(x: Tensor, dims: int, dtype: torch.dtype) -> Tensor:
    """The product: x if it has `dims` dimensions, else the sum of its partial sums in order, rounded to dtype.

    x [...] in dtype, or [S, ...] float32.
    """
    if x.ndim == dims:
        return x
    total = x[0]
    for partial in x[1:]:
        total = total + partial
    return total.to(dtype)
