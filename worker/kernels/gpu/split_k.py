"""Shared by the Triton kernels that read split-K partial sums (see split_k.py one folder above)."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def load_split_k(pointers, mask, stride, dtype: tl.constexpr, SPLIT_K: tl.constexpr):
    """The block at `pointers`; with SPLIT_K > 1 the sum, in order, of so many float32 blocks `stride` elements
    apart."""
    x = tl.load(pointers, mask=mask, other=0.0)
    for index in tl.static_range(1, SPLIT_K):
        x += tl.load(pointers + index * stride, mask=mask, other=0.0)
    return x.to(dtype)


def split_k_shape(x: Tensor, dims: int, dtype: torch.dtype) -> tuple[int, int]:
    """(number of partial sums, elements from one to the next) of a product that has `dims` dimensions when summed."""
    if x.ndim == dims:
        assert x.dtype == dtype
        return 1, 0
    assert x.ndim == dims + 1 and x.dtype == torch.float32 and x.is_contiguous()
    return x.shape[0], x.stride(0)
