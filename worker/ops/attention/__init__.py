"""Attention over the paged cache: chooses which form runs."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from worker.ops import paged_kv
from worker.ops.attention import native
from worker.ops.attention.reference import attention_torch
from worker.ops.launch_options import NO_OPTIONS, GpuOptions


def attention(
    q: Tensor, cache_k: Tensor, *args: Any,
    next_weights: Sequence[Tensor] = (), options: GpuOptions = NO_OPTIONS, **named: Any,
) -> Tensor:  # fmt: skip
    """Computes the same as attention_torch. On a GPU, an option loads `next_weights` into the L2 cache while attention
    runs.
    """
    if q.is_cuda:
        from worker.ops.attention.triton import attention_triton
        from worker.ops.linear.triton_fused import prefetching

        with prefetching(len(q), next_weights, options):
            return attention_triton(q, cache_k, *args, options=options, **named)
    form = native.attention if paged_kv.supports_cache(q.dtype, cache_k, q.shape[2]) else attention_torch
    return form(q, cache_k, *args, **named)
