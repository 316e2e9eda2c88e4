"""Functions for Triton kernels that read split-K partial sums (see worker/kernels/split_k.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Loads as usual. Triton 3.6 compiles no kernel that calls a function whose default for a constant is plain text.
NO_MODIFIER = tl.constexpr("")


@triton.jit
def load_split_k(pointers, mask, stride, dtype: tl.constexpr, SPLIT_K: tl.constexpr, CACHE: tl.constexpr = NO_MODIFIER):
    """Loads the block at `pointers`. With SPLIT_K > 1, returns the sum of SPLIT_K float32 blocks, added in order.

    stride: elements from one block to the next
    CACHE: ".cg" if other programs of the same kernel have stored the blocks: they must then be read from the L2 cache
    """
    x = tl.load(pointers, mask=mask, other=0.0, cache_modifier=CACHE)
    for index in tl.static_range(1, SPLIT_K):
        x += tl.load(pointers + index * stride, mask=mask, other=0.0, cache_modifier=CACHE)
    return x.to(dtype)


def split_k_shape(x: Tensor, dims: int, dtype: torch.dtype) -> tuple[int, int]:
    """Returns how many partial sums x has, and how many elements are between one partial sum and the next.

    dims: how many dimensions the summed matrix product has. A summed x counts as one partial sum.
    """
    if x.ndim == dims:
        assert x.dtype == dtype
        return 1, 0
    assert x.ndim == dims + 1 and x.dtype == torch.float32 and x.is_contiguous()
    return x.shape[0], x.stride(0)
