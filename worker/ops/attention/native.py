"""Calls the attention of the C library (csrc/)."""

import torch
from torch import Tensor

from worker.ops.native import MAX_HEAD_DIM, address, contiguous_heads, kernels
from worker.ops.paged_kv import check_cache, kv_format, rows_visible


def attention(
    q: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    max_kv_len: int = 0,
    *,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    bidirectional_end: Tensor | None = None,
) -> Tensor:
    """Computes the same as `attention_torch`, but reads pages in place. q [T, Hq, D], with D at most MAX_HEAD_DIM.

    max_kv_len is ignored, because the library reads seq_lens itself.

    Raises MemoryError when there is no memory for the threads' buffers.
    """
    q, heads, d = contiguous_heads(q)
    kv_heads, size = cache_k.shape[2], cache_k.shape[1]
    check_cache(cache_k, cache_v, q.dtype, kv_heads, d)
    assert heads % kv_heads == 0 and d <= MAX_HEAD_DIM and scale > 0 and softcap >= 0
    check_sinks(sinks, heads)
    assert query_start_loc.dtype == seq_lens.dtype == page_table.dtype == torch.int32
    assert query_start_loc.is_contiguous() and seq_lens.is_contiguous() and page_table.stride(1) == 1
    assert len(query_start_loc) == len(seq_lens) + 1 == len(page_table) + 1
    out = torch.empty(q.shape, dtype=q.dtype)
    if kernels()[q.dtype].attention(
        q.data_ptr(), cache_k.data_ptr(), cache_v.data_ptr(), query_start_loc.data_ptr(), seq_lens.data_ptr(),
        page_table.data_ptr(), address(sinks), rows_visible(bidirectional_end, len(q)), out.data_ptr(), len(seq_lens),
        q.stride(0), heads, kv_heads, d, size, page_table.stride(0), window, kv_format(cache_k, cache_v), scale,
        softcap, torch.get_num_threads(),
    ):  # fmt: skip
        raise MemoryError("no memory for the scratch of attention")
    return out


def check_sinks(sinks: Tensor | None, heads: int) -> None:
    assert sinks is None or (sinks.shape == (heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous())


def text_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, scale: float, reach: int = 0) -> Tensor:
    """Computes the same as `text_attention_torch`. A row has the same bits whatever other texts a step has.

    Raises MemoryError when there is no memory for the threads' buffers.
    """
    heads, d = q.shape[1:]
    assert heads % k.shape[1] == 0 and k.shape == v.shape and len(q) == len(k) and d <= MAX_HEAD_DIM
    assert q.dtype == k.dtype == v.dtype and starts.dtype == torch.int32 and starts.is_contiguous()
    assert all(one.stride(2) == 1 and one.stride(1) == d for one in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype)
    if kernels()[q.dtype].text_attention(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), starts.data_ptr(), out.data_ptr(), len(starts) - 1, heads,
        k.shape[1], d, reach, q.stride(0), k.stride(0), v.stride(0), scale, torch.get_num_threads(),
    ):  # fmt: skip
        raise MemoryError("no memory for the scratch of attention")
    return out
