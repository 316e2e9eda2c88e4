"""Attention over the paged cache, and among all tokens of a text: chooses which form runs."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from worker.ops import paged_kv
from worker.ops.attention import native
from worker.ops.attention.reference import attention_torch, text_attention_torch
from worker.ops.launch_options import NO_OPTIONS, GpuOptions
from worker.ops.native import available


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


def text_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, scale: float, reach: int = 0) -> Tensor:
    """Computes the same as text_attention_torch: in C on a CPU, with the same bits whatever other texts a step has."""
    in_torch = q.is_cuda or not available(q.dtype)
    return (text_attention_torch if in_torch else native.text_attention)(q, k, v, starts, scale=scale, reach=reach)
