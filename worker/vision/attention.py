"""Attention among all patches of a picture, by the kernels for causal attention over pages.

A row at the last position sees every key. So do several rows there: the query heads that share a key/value head are
rows of the same position. The queries of a head, some at a time, therefore become the query heads of one token at the
last position, and each sees all patches. The kernels give a row the same bits whatever else is computed with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Queries:
    """The queries of all N patches, and their keys and values in pages. Rows attend apart, as many as one likes."""

    q: Tensor  # [N, heads, D]
    k: Tensor  # [pages, PAGE, heads, D]
    v: Tensor

    @classmethod
    def of(cls, qkv: Tensor, heads: int, do: Operations, tables: tuple[Tensor, Tensor] | None = None) -> "Queries":
        """qkv: [N, 3 * heads * D]. tables: cos and sin [N, D] float32 that rotate queries and keys, if any do."""
        rows, plain, numbers = len(qkv), _is_plain(do), torch.arange(len(qkv), device=qkv.device)
        head = qkv.shape[1] // (3 * heads)
        q, k, v = qkv.view(rows, 3, heads, head).unbind(1)
        if tables is not None:
            q, k = (rotary_torch if plain else rotary)(q, k, *tables, numbers)
        cache_k, cache_v = (qkv.new_zeros(-(-rows // PAGE), PAGE, heads, head) for _ in "kv")
        store: Callable[..., None] = store_kv_torch if plain else store_kv
        store(k, v, cache_k, cache_v, numbers)
        return cls(q, cache_k, cache_v)

    def attend(self, rows: slice, do: Operations) -> Tensor:
        """Returns softmax(q k^T / sqrt(D)) v of some rows, among the keys of all: [rows, heads * D]."""
        q, (patches, heads, head) = self.q[rows], self.q.shape
        group = min(patches, GROUP_GPU if q.is_cuda else GROUP)
        tokens = -(-len(q) // group)
        padded = q.new_zeros(tokens * group, heads, head)
        padded[: len(q)] = q
        ints = partial(torch.tensor, dtype=torch.int32, device=q.device)
        mixed = do.attention(
            _swapped(padded.view(tokens, group, heads, head)).view(tokens, heads * group, head), self.k, self.v,
            ints(range(tokens + 1)), ints([patches] * tokens), ints([list(range(len(self.k)))] * tokens), patches,
            scale=head**-0.5, window=0,
        )  # fmt: skip
        return _swapped(mixed.view(tokens, heads, group, head)).view(tokens * group, heads * head)[: len(q)]


def _is_plain(do: Operations) -> bool:
    return do.attention is attention_torch


def _swapped(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()
