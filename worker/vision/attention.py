"""Attention among all patches of a picture, by the kernels for causal attention over pages.

In causal attention, a token at the last position sees every key, and so do all its query heads. This module therefore
passes the queries of many patches to the kernel as if they were the query heads of one token at the last position. Each
query then sees all patches, or all patches of its window. The kernels give a row the same bits whatever else they
compute with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from worker.kernels.attention import attention_torch
from worker.kernels.forms import rotary, store_kv
from worker.kernels.operations import Operations
from worker.kernels.rowwise.rotary import rotary_torch
from worker.kernels.rowwise.store_kv import store_kv_torch
from worker.vision.windows import Windows

PAGE = 64
ROWS = 512  # patches whose queries are computed in one piece
ATTENTION_COST = 3  # a multiplication of attention takes as long as 3 of a linear, measured with AMX
GROUP, GROUP_GPU = 256, 64  # how many queries become heads of one token: a work item in C, a tile on GPUs


@dataclass(frozen=True, slots=True)
class Queries:
    """The queries of all N patches, and their keys and values in pages. Attention can be computed for any rows."""

    q: Tensor  # [N, heads, D]
    k: Tensor  # [pages, PAGE, heads, D]
    v: Tensor
    windows: Windows  # the windows of rows that see each other; each window has its own pages
    scale: float  # the factor of the attention scores

    @classmethod
    def of(
        cls, qkv: Tensor, heads: int, windows: Windows, do: Operations, tables: tuple[Tensor, Tensor] | None = None,
        scale: float | None = None,
    ) -> "Queries":  # fmt: skip
        """qkv: [N, 3 * heads * D]. tables: cos and sin [N, D] float32 to rotate queries and keys; None: no rotation

        scale: the factor of the attention scores; None: 1 / sqrt(D)
        """
        rows, plain = len(qkv), _is_plain(do)
        head = qkv.shape[1] // (3 * heads)
        q, k, v = qkv.view(rows, 3, heads, head).unbind(1)
        if tables is not None:
            q, k = (rotary_torch if plain else rotary)(q, k, *tables, torch.arange(rows, device=qkv.device))
        first_pages, pages = _pages(windows)
        slots = torch.cat(
            [first * PAGE + torch.arange(each) for first, each in zip(first_pages, windows.lengths, strict=True)]
        )
        cache_k, cache_v = (qkv.new_zeros(pages, PAGE, heads, head) for _ in "kv")
        store: Callable[..., None] = store_kv_torch if plain else store_kv
        store(k, v, cache_k, cache_v, slots.to(qkv.device))
        return cls(q, cache_k, cache_v, windows, head**-0.5 if scale is None else scale)

    def attend(self, rows: slice, do: Operations) -> Tensor:
        """Returns softmax(scale q k^T) v for some rows, over the keys of their windows: [rows, heads * D]."""
        lengths, (patches, heads, head), device = self.windows.lengths, self.q.shape, self.q.device
        group = min(max(lengths), GROUP_GPU if self.q.is_cuda else GROUP)
        parts = list(self.windows.parts(rows.start, min(rows.stop, patches), group))
        places = torch.cat([at * group + torch.arange(end - start) for at, (_, start, end) in enumerate(parts)])
        places = places.to(device)
        padded = self.q.new_zeros(len(parts) * group, heads, head)
        padded[places] = self.q[rows]
        first_pages, _ = _pages(self.windows)
        longest = -(-max(lengths) // PAGE)
        pages = [[first_pages[index] + page for page in range(longest)] for index, _, _ in parts]
        ints = partial(torch.tensor, dtype=torch.int32, device=device)
        mixed = do.attention(
            _swapped(padded.view(len(parts), group, heads, head)).view(len(parts), heads * group, head), self.k, self.v,
            ints(range(len(parts) + 1)), ints([lengths[index] for index, _, _ in parts]),
            ints(pages).clamp(max=len(self.k) - 1), max(lengths), scale=self.scale, window=0,
        )  # fmt: skip
        return _swapped(mixed.view(len(parts), heads, group, head)).view(-1, heads * head)[places]


def _pages(windows: Windows) -> tuple[list[int], int]:
    """Returns the first page of each window, and the total number of pages."""
    *firsts, pages = accumulate((-(-each // PAGE) for each in windows.lengths), initial=0)
    return firsts, pages


def _is_plain(do: Operations) -> bool:
    return do.attention is attention_torch


def _swapped(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()
