"""What the Triton kernels that read terms (see terms.py) share."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def load_split_k(at, inside, stride, dtype: tl.constexpr, TERMS: tl.constexpr):
    """The block at pointers `at`: as it is, or TERMS float32 blocks `stride` elements apart, added in order."""
    x = tl.load(at, mask=inside, other=0.0)
    for term in tl.static_range(1, TERMS):
        x += tl.load(at + term * stride, mask=inside, other=0.0)
    return x.to(dtype)


def split_k_shape(x: Tensor, dims: int, dtype: torch.dtype) -> tuple[int, int]:
    """(terms, elements from one to the next) of a product that has `dims` dimensions once it is added."""
    if x.ndim == dims:
        assert x.dtype == dtype
        return 1, 0
    assert x.ndim == dims + 1 and x.dtype == torch.float32 and x.is_contiguous()
    return x.shape[0], x.stride(0)
