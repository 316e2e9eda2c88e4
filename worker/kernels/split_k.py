"""Defines the partial sums of a split-K matrix product, which the next kernel adds up while it reads them.

On a GPU, a matrix product with few columns keeps all multiprocessors busy only if several of them share a column, each
with a part of K. Adding up their sums would take another kernel. So `linear` may return partial sums, and the norms and
`qkv_rope_write` accept partial sums as well as a plain result.
"""

import torch
from torch import Tensor


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
