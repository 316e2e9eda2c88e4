"""Attention among all patches of a picture, by the kernels for causal attention over pages.

A row at the last position sees every key. So do several rows there: the query heads that share a key/value head are
rows of the same position. The queries of a head, some at a time, therefore become the query heads of one token at the
last position, and each sees all patches. The kernels give a row the same bits whatever else is computed with it.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from worker.kernels.attention import attention_torch
from worker.kernels.forms import rotary, store_kv
from worker.kernels.operations import Operations
from worker.kernels.rowwise.rotary import rotary_torch
from worker.kernels.rowwise.store_kv import store_kv_torch

PAGE = 64
GROUP, GROUP_GPU = 256, 64  # queries that become heads of one token: what a work item or a tile of the kernels holds


def attend_all(qkv: Tensor, heads: int, do: Operations, tables: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Returns softmax(q k^T / sqrt(D)) v among all N rows, [N, heads * D]. qkv [N, 3 * heads * D]

    tables: cos and sin [N, D] float32, by which queries and keys are rotated before; None: they are not
    """
    rows, device = len(qkv), qkv.device
    head = qkv.shape[1] // (3 * heads)
    q, k, v = qkv.view(rows, 3, heads, head).unbind(1)
    plain, numbers = do.attention is attention_torch, torch.arange(rows, device=device)
    if tables is not None:
        q, k = (rotary_torch if plain else rotary)(q, k, *tables, numbers)
    pages = -(-rows // PAGE)
    cache_k, cache_v = (qkv.new_zeros(pages, PAGE, heads, head) for _ in "kv")
    store: Callable[..., None] = store_kv_torch if plain else store_kv
    store(k, v, cache_k, cache_v, numbers)
    group = min(rows, GROUP_GPU if qkv.is_cuda else GROUP)
    tokens = -(-rows // group)
    padded = qkv.new_zeros(tokens * group, heads, head)
    padded[:rows] = q
    ints = partial(torch.tensor, dtype=torch.int32, device=device)
    mixed = do.attention(
        _swapped(padded.view(tokens, group, heads, head)).view(tokens, heads * group, head), cache_k, cache_v,
        ints(range(tokens + 1)), ints([rows] * tokens), ints([list(range(pages))] * tokens), rows,
        scale=head**-0.5, window=0,
    )  # fmt: skip
    return _swapped(mixed.view(tokens, heads, group, head)).view(tokens * group, heads * head)[:rows]


def _swapped(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()
