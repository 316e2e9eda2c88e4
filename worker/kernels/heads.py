"""Between the fused projection and attention: norm of queries and keys, rotation, K/V write.

On CUDA and on the CPU one pass over the rows, which gives the same bits as the three kernels one after the other.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from worker.kernels import native
from worker.kernels.norm import rms_norm, rms_norm_torch
from worker.kernels.rotary import rotary, rotary_torch
from worker.kernels.terms import added
from worker.kernels.write import write_kv, write_kv_torch


def heads(
    qkv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: bool,
    dtype: torch.dtype,
) -> Tensor:
    """qkv [T, (Hq + 2 Hk) * D] -> q [T, Hq, D] in `dtype`, rotated; k and v go to `slots` [T] of the caches.

    qkv in `dtype`, or its terms (see terms.py); cache_k, cache_v [pages, page_size, Hk, D] as in write.py; cos, sin
    [M, D] float32; norm weights [D], or None for none.
    """
    if qkv.is_cuda:
        from worker.kernels.heads_triton import heads_triton

        return heads_triton(
            qkv, cache_k, cache_v, cos, sin, positions, slots,
            q_norm=q_norm, k_norm=k_norm, eps=eps, offset=offset, dtype=dtype,
        )  # fmt: skip
    if native.available(dtype) and cache_k.dtype == dtype:
        return native.heads(
            added(qkv, 2, dtype), cache_k, cache_v, cos, sin, positions, slots,
            q_norm=q_norm, k_norm=k_norm, eps=eps, offset=offset,
        )  # fmt: skip
    return heads_apart(
        qkv, cache_k, cache_v, cos, sin, positions, slots,
        q_norm=q_norm, k_norm=k_norm, eps=eps, offset=offset, dtype=dtype,
    )  # fmt: skip


def heads_apart(
    qkv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: bool,
    dtype: torch.dtype,
    norm: Callable[..., Tensor] = rms_norm,
    rotate: Callable[..., tuple[Tensor, Tensor]] = rotary,
    write: Callable[..., None] = write_kv,
) -> Tensor:
    """The same by the three functions one after the other."""
    kv_heads, dim = cache_k.shape[2:]
    parts = added(qkv, 2, dtype).view(qkv.shape[-2], -1, dim)
    q, k, v = parts.split_with_sizes([parts.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = norm(q, q_norm, eps, offset=offset), norm(k, k_norm, eps, offset=offset)
    q, k = rotate(q, k, cos, sin, positions)
    write(k, v, cache_k, cache_v, slots)
    return q


# `heads` by plain PyTorch alone
heads_torch = partial(heads_apart, norm=rms_norm_torch, rotate=rotary_torch, write=write_kv_torch)
