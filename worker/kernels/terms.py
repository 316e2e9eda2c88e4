"""A product that was cut along K and is not added up yet: whoever reads it next does that on the way.

On a GPU a narrow product keeps all multiprocessors busy only if several of them share a column; their results would
cost a kernel of their own to add. So `linear` may return them as terms, and the norms and `heads` take either.
"""

import torch
from torch import Tensor


def added(x: Tensor, dims: int, dtype: torch.dtype) -> Tensor:
    """The product itself: x where it has `dims` dimensions, else the sum of its terms in order, rounded to dtype.

    x [...] in dtype, or [S, ...] float32.
    """
    if x.ndim == dims:
        return x
    total = x[0]
    for term in x[1:]:
        total = total + term
    return total.to(dtype)
