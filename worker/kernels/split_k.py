"""Defines the partial sums of a split-K matrix product, which the next kernel adds as it reads them.

On a GPU, a matrix product with few columns keeps all multiprocessors busy only if several of them share a column, each
with a part of K. Adding their sums would take another kernel. So `linear` may return partial sums, and the norms and
`qkv_rope_write` accept partial sums as well as a plain result.
"""

import torch
from torch import Tensor


def sum_split_k(x: Tensor, dims: int, dtype: torch.dtype) -> Tensor:
    """Returns the matrix product: x itself if it has `dims` dimensions, else the sum of its partial sums.

    The sums are added in order and rounded to dtype once. x is [...] in dtype, or [S, ...] in float32.
    """
    if x.ndim == dims:
        return x
    total = x[0]
    for partial in x[1:]:
        total = total + partial
    return total.to(dtype)
