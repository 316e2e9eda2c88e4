"""Computes the steps between the qkv projection and attention: norm of queries and keys, rotary embedding, K/V write.

The Triton kernel and the C library do all of this in one pass over the rows, with the same bits as the three operations
one after another.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from worker.kernels.rowwise.norm import rms_norm_torch
from worker.kernels.rowwise.rotary import rotary_torch
from worker.kernels.rowwise.store_kv import store_kv_torch
from worker.kernels.split_k import sum_split_k


def qkv_rope_write_torch(
    qkv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    v_norm: Tensor | None = None,
    eps: float,
    offset: bool,
    dtype: torch.dtype,
    norm_last: bool = False,
    norm: Callable[..., Tensor] = rms_norm_torch,
    rotate: Callable[..., tuple[Tensor, Tensor]] = rotary_torch,
    write: Callable[..., None] = store_kv_torch,
) -> Tensor:
    """Returns the rotated q [T, Hq, D] in `dtype`, and writes k and v to the slots `slot_mapping` [T] of the caches.

    qkv [T, (Hq + 2 Hk) * D] in `dtype`, or its split-K partial sums (see split_k.py); cache_k, cache_v [pages,
    page_size, Hk, D] or as store_kv.py says; cos, sin [M, D] float32; positions [T]: rows of the tables. q_norm and
    k_norm are None if there are no norms, [D] for a norm of each head, or [Hq * D] and [Hk * D] for one norm of all
    query heads and one of all key heads; v_norm [D] or None. norm_last: if true, norms of heads follow the rotation
    instead of preceding it. If Hk is 0, there are only queries. norm, rotate, write: other forms of the three
    operations.
    """
    kv_heads, dim = cache_k.shape[2], cos.shape[1]
    parts = sum_split_k(qkv, 2, dtype).view(qkv.shape[-2], -1, dim)
    q, k, v = parts.split_with_sizes([parts.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norm_last:
        q, k = rotate(q, k, cos, sin, positions)
    if q_norm is not None and k_norm is not None:
        if len(q_norm) != dim:
            q, k = q.flatten(1), k.flatten(1)
        q, k = norm(q, q_norm, eps, offset=offset), norm(k, k_norm, eps, offset=offset)
        q, k = q.view(len(q), -1, dim), k.view(len(k), kv_heads, dim)
    if v_norm is not None:
        v = norm(v, v_norm, eps, offset=offset)
    if not norm_last:
        q, k = rotate(q, k, cos, sin, positions)
    if kv_heads:
        write(k, v, cache_k, cache_v, slot_mapping)
    return q
