"""Attention among all tokens of a text, in both directions, without a K/V cache: encoders compute whole texts.

Texts lie one after another in the rows of a matrix. The C kernel gives a row the same bits whatever other texts a step
has. Other devices use plain PyTorch, which defines what the kernel computes.
"""

from itertools import pairwise

import torch
from torch import Tensor

from worker.ops.native import MAX_HEAD_DIM, available, kernels


def text_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, scale: float, reach: int = 0) -> Tensor:
    """Returns softmax(scale q k^T) v within each text, [T, Hq, D], rounded to q's dtype once.

    q [T, Hq, D], k and v [T, Hk, D], whose rows may be strided; starts [texts + 1] int32 on the host: the first row of
    each text, and T. reach: a token sees the tokens at most `reach` before and after it; 0: all tokens of its text

    Raises MemoryError when there is no memory for the threads' buffers.
    """
    if q.is_cuda or not available(q.dtype):
        return text_attention_torch(q, k, v, starts, scale=scale, reach=reach)
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


def text_attention_torch(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, scale: float, reach: int = 0) -> Tensor:
    """Computes the same as `text_attention` in fp32, one text after another."""
    group, out = q.shape[1] // k.shape[1], torch.empty_like(q, memory_format=torch.contiguous_format)
    for begin, end in pairwise(starts.tolist()):
        queries, keys, values = (
            one[begin:end].float().repeat_interleave(times, dim=1).transpose(0, 1)
            for one, times in ((q, 1), (k, group), (v, group))
        )
        scores = (queries @ keys.transpose(1, 2)) * scale
        if reach:
            places = torch.arange(end - begin, device=q.device)
            far = (places[:, None] - places).abs() > reach
            scores = scores.masked_fill(far, float("-inf"))
        out[begin:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
    return out
