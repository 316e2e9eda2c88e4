"""Terms: the partial sums of a split-K product, which the next kernel adds up as it reads them.

On a GPU a narrow product keeps all multiprocessors busy only if several of them share a column, each with a part of K;
to add their sums would take a kernel of its own. So `linear` may return terms, and the norms and `heads` take either.
"""

import torch
from torch import Tensor


def sum_split_k(x: Tensor, dims: int, dtype: torch.dtype) -> Tensor:
    """The product itself: x where it has `dims` dimensions, else the sum of its terms in order, rounded to dtype.

    x [...] in dtype, or [S, ...] float32.
    """
    if x.ndim == dims:
        return x
    total = x[0]
    for term in x[1:]:
        total = total + term
    return total.to(dtype)
