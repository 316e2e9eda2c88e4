"""Calls rotary embedding and K/V write of the C library (csrc/rope.c)."""

import torch
from torch import Tensor

from worker.ops.native import address, contiguous_heads, kernels
from worker.ops.norm.native import HEADS, ROTATED_HEADS, WHOLE
from worker.ops.paged_kv import check_cache, check_centre, check_tables, kv_format


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the same as `rotary_torch`.

    q [T, Hq, D], k [T, Hk, D]; cos, sin [M, D] fp32; positions [T] int64, all below M.
    """
    return _rotate(q, cos, sin, positions), _rotate(k, cos, sin, positions)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    x, heads, d = contiguous_heads(x)
    check_tables(cos, sin, positions, x.shape[0], d)
    out = torch.empty(x.shape, dtype=x.dtype)
    kernels()[x.dtype].rotary(
        x.data_ptr(), out.data_ptr(), cos.data_ptr(), sin.data_ptr(), positions.data_ptr(),
        x.shape[0], heads, d, x.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    return out


def store_kv(
    k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, slot_mapping: Tensor, k_centre: Tensor | None = None
) -> None:
    """Does the same as `store_kv_torch`: writes rows of k and v [T, Hk, D] to the slots slot_mapping [T] int64."""
    (k, heads, d), v = contiguous_heads(k), contiguous_heads(v)[0]
    assert k.shape == v.shape and k.dtype == v.dtype
    check_cache(cache_k, cache_v, k.dtype, heads, d)
    assert slot_mapping.dtype == torch.int64 and slot_mapping.shape == (k.shape[0],) and slot_mapping.is_contiguous()
    check_centre(k_centre, cache_k, heads, d)
    kernels()[k.dtype].store_kv(
        k.data_ptr(), v.data_ptr(), address(k_centre), cache_k.data_ptr(), cache_v.data_ptr(), slot_mapping.data_ptr(),
        k.shape[0], heads, d, k.stride(0), v.stride(0), kv_format(cache_k, cache_v),
    )  # fmt: skip


def qkv_rope_write(
    qkv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    v_norm: Tensor | None = None,
    k_centre: Tensor | None = None,
    eps: float = 0.0,
    offset: bool = False,
    norm_last: bool = False,
) -> Tensor:
    """Computes all steps between the qkv matmul and attention in one pass: q/k norm (if given), rotary embedding, K/V
    write.

    norm_last: if true, the norm of queries and keys follows the rotary embedding

    Returns q [T, Hq, D]. qkv [T, (Hq + 2 Hk) * D] contiguous; caches [pages, page_size, Hk, D]; norm weights [D], or
    [Hq * D] and [Hk * D]; v_norm [D]; k_centre [Hk, D] float32, as store_kv_torch says. Without key heads (Hk 0), only
    queries are computed. Without a cache for values, there are none: qkv [T, (Hq + Hk) * D].
    Gives the same bits as `rms_norm`, `rotary` and `store_kv` one after another.
    """
    kv_heads, d = cache_k.shape[2], cos.shape[1]
    written = kv_heads * (1 if cache_v is None else 2)
    q_heads, values = qkv.shape[1] // d - written, cache_k if cache_v is None else cache_v
    assert qkv.is_contiguous() and qkv.shape[1] == (q_heads + written) * d and (cache_v is not None or v_norm is None)
    check_cache(cache_k, values, qkv.dtype, kv_heads, d)
    check_tables(cos, sin, positions, qkv.shape[0], d)
    assert slot_mapping.dtype == torch.int64 and slot_mapping.shape == (qkv.shape[0],) and slot_mapping.is_contiguous()
    check_centre(k_centre, cache_k, kv_heads, d)
    normed = normed_heads(q_norm, d, norm_last)
    assert v_norm is None or (v_norm.dtype == qkv.dtype and v_norm.is_contiguous() and v_norm.shape == (d,))
    for weight, heads in ((q_norm, q_heads), (k_norm, kv_heads)):
        assert weight is None or (weight.dtype == qkv.dtype and weight.is_contiguous())
        assert weight is None or weight.shape == (heads * d if normed == WHOLE else d,)
    q = torch.empty(qkv.shape[0], q_heads, d, dtype=qkv.dtype)
    kernels()[qkv.dtype].qkv_rope_write(
        qkv.data_ptr(), q.data_ptr(), cache_k.data_ptr(), address(cache_v), address(q_norm), address(k_norm),
        address(v_norm), address(k_centre), cos.data_ptr(), sin.data_ptr(), positions.data_ptr(),
        slot_mapping.data_ptr(), eps, offset, qkv.shape[0], q_heads, kv_heads, d, normed, kv_format(cache_k, values),
        torch.get_num_threads(),
    )  # fmt: skip
    return q


def normed_heads(q_norm: Tensor | None, d: int, norm_last: bool) -> int:
    """Returns HEADS, WHOLE or ROTATED_HEADS: which elements one norm of queries or keys covers."""
    whole = q_norm is not None and len(q_norm) != d
    assert not (whole and norm_last)
    return WHOLE if whole else ROTATED_HEADS if norm_last else HEADS
