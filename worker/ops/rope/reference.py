"""Computes the steps between the qkv projection and attention: norm of queries and keys, rotary embedding, K/V write.

The Triton kernel and the C library do all of this in one pass over the rows, with the same bits as the three operations
one after another.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from worker.ops.norm.reference import rms_norm_torch, sum_split_k
from worker.ops.paged_kv import has_scales, keys_are_rotated, quantize_rows

# Applies rotary position embedding in the "rotate half" convention: dimensions i and i + D / 2 rotate together.
#
# A row of the fp32 tables is as long as a head; both halves of a row are equal. The rotation is computed in fp32 and
# rounded once. (Hugging Face casts the tables to the model's dtype first. For a model in fp32, the results are the
# same in every bit.)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the same as `rotary_torch` for batches q [B, Hq, S, D] and k [B, Hk, S, D].

    cos, sin: either [S, D], for all sequences, or [B, S, D], with a table for the positions of each sequence.
    Raises ValueError for tables of any other rank.
    """
    if cos.ndim not in (2, 3):
        raise ValueError(f"cos must be [seq, head_dim] or [batch, seq, head_dim], got {tuple(cos.shape)}")
    batch, _, length, size = q.shape
    rows = torch.arange(length if cos.ndim == 2 else batch * length, device=q.device)
    positions = rows.repeat(batch) if cos.ndim == 2 else rows
    flat_q, flat_k = (x.transpose(1, 2).reshape(batch * length, -1, size) for x in (q, k))
    out_q, out_k = rotary_torch(flat_q, flat_k, cos.reshape(-1, size), sin.reshape(-1, size), positions)
    return _unflatten(out_q, batch), _unflatten(out_k, batch)


def rotary_torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates all heads of row t by row positions[t] of the tables.

    q [T, Hq, D], k [T, Hk, D], whose rows may be strided; cos, sin [M, D] fp32; positions [T] int64, all below M.
    Returns contiguous tensors of the same shapes and dtypes.
    """
    cos_t, sin_t = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, D]
    return _rotate(q, cos_t, sin_t), _rotate(k, cos_t, sin_t)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x_fp32 = x.float()
    low, high = x_fp32.chunk(2, dim=-1)
    return (x_fp32 * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


def _unflatten(x: Tensor, batch: int) -> Tensor:
    """Reshapes [B * S, H, D] to [B, H, S, D]."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2).contiguous()


# Writes the keys and values of a step to the paged cache. This part knows slots, not sequences.


def store_kv_torch(
    k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, slot_mapping: Tensor, k_centre: Tensor | None = None
) -> None:
    """Writes row t of k and v to slot slot_mapping[t] = page * page_size + offset of the caches, in place.

    k, v [T, Hk, D], whose rows may be strided; cache_k, cache_v contiguous: either [pages, page_size, Hk, D] of k's
    dtype or float8_e4m3fn (values are clamped to +-448), or with codes and their scale in the last dimension
    (worker/ops/paged_kv.py); slot_mapping [T] int64, with distinct slots except in the scratch page.
    k_centre [Hk, D] float32: is subtracted from keys that become int8 with their scale, the only format that has one
    """
    assert k_centre is None or keys_are_rotated(cache_k)
    for new, cache, centre in ((k, cache_k, k_centre), (v, cache_v, None)):
        if has_scales(cache, k.shape[2]):
            new, cache = quantize_rows(new, cache.dtype, centre), cache.view(torch.uint8)
        elif cache.dtype == torch.float8_e4m3fn:  # torch cannot index float8
            limit = torch.finfo(cache.dtype).max
            new, cache = new.clamp(-limit, limit).to(cache.dtype).view(torch.uint8), cache.view(torch.uint8)
        cache.flatten(0, 1).index_copy_(0, slot_mapping, new.to(cache.dtype))


def qkv_rope_write_torch(
    qkv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    v_norm: Tensor | None = None,
    k_centre: Tensor | None = None,
    eps: float,
    offset: bool,
    dtype: torch.dtype,
    norm_last: bool = False,
    norm: Callable[..., Tensor] = rms_norm_torch,
    rotate: Callable[..., tuple[Tensor, Tensor]] = rotary_torch,
    write: Callable[..., None] = store_kv_torch,
) -> Tensor:
    """Returns the rotated q [T, Hq, D] in `dtype`, and writes k and v to the slots `slot_mapping` [T] of the caches.

    qkv [T, (Hq + 2 Hk) * D] in `dtype`, or its split-K partial sums (see sum_split_k); cache_k, cache_v [pages,
    page_size, Hk, D] or as store_kv says; cos, sin [M, D] float32; positions [T]: rows of the tables. q_norm and
    k_norm are None if there are no norms, [D] for a norm of each head, or [Hq * D] and [Hk * D] for one norm of all
    query heads and one of all key heads; v_norm [D] or None. k_centre: as store_kv says. norm_last: if true, norms of
    heads follow the rotation instead of preceding it. If Hk is 0, there are only queries. If cache_v is None, there are
    no values: qkv [T, (Hq + Hk) * D]. norm, rotate, write: other forms of the three operations.
    """
    kv_heads, dim = cache_k.shape[2], cos.shape[1]
    parts = sum_split_k(qkv, 2, dtype).view(qkv.shape[-2], -1, dim)
    values = 0 if cache_v is None else kv_heads
    q, k, v = parts.split_with_sizes([parts.shape[1] - kv_heads - values, kv_heads, values], dim=1)
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
    if k_centre is not None:
        write = partial(write, k_centre=k_centre)
    if cache_v is None:
        write(k, k, cache_k, cache_k, slot_mapping)
    elif kv_heads:
        write(k, v, cache_k, cache_v, slot_mapping)
    return q
