"""Attention among the patches of an image: windows, positions, rotary embeddings.

It uses the kernels for causal attention over pages. There, a token at the last position attends to every key, and so do
all its query heads. This module therefore passes the queries of many patches to the kernel as if they were the query
heads of one token at the last position. Each query then attends to all patches, or to all patches of its window. The
kernels give a row the same bits whatever else they compute with it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.operations import Operations
from worker.ops.attention.reference import attention_torch
from worker.ops.rope import rotary, store_kv
from worker.ops.rope.reference import rotary_torch, store_kv_torch

# Windows: in most layers of some towers, a patch attends only to the patches of its own square window of the image.


@dataclass(frozen=True, slots=True)
class Windows:
    """Rows that lie one window after another. lengths: how many rows each window has, never 0"""

    lengths: tuple[int, ...]

    @property
    def begins(self) -> list[int]:
        return list(accumulate(self.lengths[:-1], initial=0))

    def parts(self, first: int, end: int, most: int) -> Iterator[tuple[int, int, int]]:
        """Yields the rows first .. end - 1 in parts of at most `most` rows of one window.

        A part is (index of the window, first row, end).
        """
        for index, (begin, length) in enumerate(zip(self.begins, self.lengths, strict=True)):
            for start in range(max(first, begin), min(end, begin + length), most):
                yield index, start, min(start + most, end, begin + length)


def in_windows(rows: int, columns: int, side: int) -> tuple[Tensor, Windows]:
    """Returns the indices of the patches of a grid, window by window, and the windows. Indices count row by row.

    side: patches along a side of a window; windows at the right and at the bottom may be smaller
    """
    grid = torch.arange(rows * columns).view(rows, columns)
    corners = [(row, column) for row in range(0, rows, side) for column in range(0, columns, side)]
    squares = [grid[row : row + side, column : column + side].flatten() for row, column in corners]
    return torch.cat(squares), Windows(tuple(map(len, squares)))


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
    windows: Windows  # the windows of rows that attend to each other; each window has its own pages
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


# Position embeddings of patches: learned ones, which are stretched over any grid, and rotary ones.
#
# Tables are computed on the CPU, so that all devices and any number of threads use the same bits.


def stretched(stored: Tensor, side: int, rows: int, columns: int) -> Tensor:
    """Returns a position embedding for each patch, [rows * columns, H] float32: a bilinear mean of the nearest four.

    stored [side * side, H]: the embeddings of a square grid whose corners are the corners of the image
    """
    return _mixed(stored, side, _neighbours(rows, side), _neighbours(columns, side))


def resized(stored: Tensor, side: int, rows: int, columns: int) -> Tensor:
    """Returns what `stretched` does, but resizes the square grid as `torch.nn.functional.interpolate` does an image.

    The mode is bilinear, with `align_corners=False` and `antialias=True`. If the image's grid is smaller than the
    stored grid, a result is the mean of more than four stored embeddings.
    """
    return _mixed(stored, side, _covered(rows, side), _covered(columns, side))


def by_axes(stored: Tensor, rows: int, columns: int) -> Tensor:
    """Returns a position embedding for each patch, [rows * columns, H]: the sum of two, for its column and its row.

    stored [2, P, H]: the embeddings of columns, and of rows
    """
    total: Tensor = stored[0, None, :columns] + stored[1, :rows, None]
    return total.flatten(0, 1)


def _mixed(stored: Tensor, side: int, by_row: tuple[Tensor, Tensor], by_column: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the weighted mean of stored embeddings for each patch. They are added in a fixed order.

    by_row, by_column: the indices of the stored rows or columns that are read, and their weights; both [count, read]
    """
    (down, down_weights), (across, across_weights) = by_row, by_column
    total: Tensor | None = None
    for i in range(down.shape[1]):
        for j in range(across.shape[1]):
            index = (down[:, i, None] * side + across[None, :, j]).flatten().to(stored.device)
            weight = (down_weights[:, i, None] * across_weights[None, :, j]).flatten().to(stored.device)
            part = stored[index].float() * weight[:, None]
            total = part if total is None else total + part
    assert total is not None
    return total


def _neighbours(count: int, side: int) -> tuple[Tensor, Tensor]:
    """Returns, for each of `count` points along an axis, the two stored indices around it, and weights: [count, 2]."""
    places = torch.arange(count, dtype=torch.float32) * (side - 1) / max(count - 1, 1)
    below = places.floor()
    share = places - below
    around = below.long()[:, None] + torch.arange(2)
    return around.clamp(max=side - 1), torch.stack([1 - share, share], dim=1)


def _covered(count: int, side: int) -> tuple[Tensor, Tensor]:
    """Returns, for each of `count` equal parts of an axis, the stored indices under its triangle filter, and weights.

    The triangle is two parts wide, but never narrower than two stored steps.
    """
    scale = side / count
    reach = max(scale, 1.0)
    centres = scale * (torch.arange(count, dtype=torch.float32) + 0.5)
    first = (centres - reach + 0.5).clamp(min=0).long()
    around = first[:, None] + torch.arange(int(2 * reach) + 2)
    weights = (1 - (around + 0.5 - centres[:, None]).abs() / reach).clamp(min=0) * (around < side)
    return around.clamp(max=side - 1), weights / weights.sum(dim=1, keepdim=True)


def rotary_tables(
    rows: int, columns: int, head_dim: int, theta: float, device: torch.device, *, alternate: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin for each patch, [rows * columns, head_dim] float32, in the order of rows.

    In both halves of a head, the first half rotates by the patch's row and the second half by its column.
    alternate: whether frequencies, from high to low, are given to rows and columns in turn; else rows and columns use
    the same ones
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    of_rows, of_columns = powers[0::2], powers[1::2] if alternate else powers[0::2]
    row = torch.arange(rows).repeat_interleave(columns)
    column = torch.arange(columns).repeat(rows)
    places = torch.arange(max(rows, columns), dtype=torch.float32)[:, None]
    by_row, by_column = (places * (1.0 / theta**each) for each in (of_rows, of_columns))

    def table(rows_of: Tensor, columns_of: Tensor) -> Tensor:
        return torch.cat([rows_of[row], columns_of[column]], dim=1).repeat(1, 2).to(device)

    return table(by_row.cos(), by_column.cos()), table(by_row.sin(), by_column.sin())


# M-RoPE: an image's token rotates by three positions: time, row and column. For a text token, all three are equal.
#
# An image takes as many positions as its longer side has tokens; the text after it continues from there.


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """The images of a prompt: the index of the first token of each, and its rows and columns of tokens."""

    starts: Sequence[int]
    squares: Sequence[tuple[int, int]]

    @property
    def saved(self) -> int:
        """How many more tokens than positions the images have. The position of a token after all of them is its
        index minus this number, for all three.
        """
        return sum(rows * columns - max(rows, columns) for rows, columns in self.squares)

    def between(self, begin: int, end: int) -> NDArray[np.int64]:
        """Returns the three positions of the tokens begin .. end - 1 of a sequence, [3, end - begin]."""
        found = np.tile(np.arange(begin, end), (3, 1))
        saved = 0  # how many more tokens than positions the images so far have
        last = bisect_right(self.starts, end - 1)
        for start, (rows, columns) in zip(self.starts[:last], self.squares[:last], strict=True):
            tokens = rows * columns
            first, after = max(begin, start), min(end, start + tokens)
            if first < after:
                index = np.arange(first, after) - start
                base = start - saved
                found[:, first - begin : after - begin] = base + np.stack(
                    [index * 0, index // columns, index % columns]
                )
            saved += tokens - max(rows, columns)
            if start + tokens < end:
                rest = max(begin, start + tokens)
                found[:, rest - begin :] = np.arange(rest, end) - saved
        return found


def components(sections: tuple[int, int, int], width: int, *, alternate: bool = True) -> list[int]:
    """Returns, for each column of a rotary table, which of a token's three positions selects the row that is read.

    sections: the number of pairs of a head that rotate by each position
    alternate: whether pairs of different sections alternate; else the pairs of a section are adjacent
    width: the number of columns; both halves are equal
    """
    half = [0] * (width // 2)
    if not alternate:
        together = [component for component, pairs in enumerate(sections) for _ in range(pairs)]
        return [*together, *half][: len(half)] * 2
    for component in (1, 2):
        for pair in range(component, min(3 * sections[component], len(half)), 3):
            half[pair] = component
    return half * 2
