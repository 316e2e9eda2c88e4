"""Triton kernels that add the products of LoRA adapters to a linear's output: two launches for all adapters of a step.

The rows of each adapter are cut into tiles. The programs of a tile read the addresses of its adapter's matrices from
tables. All tiles have the same size, and K is one chain in ascending order, so the bits of a row depend only on this
row and its adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.lora.loaded import Product
from worker.ops.linear.triton_accumulate import accumulate_chain
from worker.ops.linear.triton_tiles import cdiv

TILE_ROWS, TILE_RANKS, TILE_COLUMNS, TILE_DEPTH = 16, 32, 64, 64
ROW_FIELDS = 3  # the fields of a tile: index of its adapter, index of its first row in `order`, number of rows
PART_FIELDS = 7  # the fields of a part: addresses of A, B and factors; first rank, ranks; first column, columns


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """The rows of adapters, in tiles.

    order [S] int64: the rows of the first adapter, then the rows of the second adapter, and so on
    tiles [n, ROW_FIELDS] int32: a row for each tile
    scales [adapters] float32: the scale of each adapter
    """

    order: Tensor
    tiles: Tensor
    scales: Tensor


def tiles_of(rows: Sequence[Tensor], scales: Sequence[float]) -> AdapterTiles:
    """Cuts the rows of each adapter into tiles. rows: for each adapter [S] int64, with S at least 1"""
    device, first, tiles = rows[0].device, 0, list[tuple[int, int, int]]()
    for adapter, own in enumerate(rows):
        end = first + len(own)
        tiles += [(adapter, at, min(TILE_ROWS, end - at)) for at in range(first, end, TILE_ROWS)]
        first = end
    table = torch.tensor(tiles, dtype=torch.int32).to(device, non_blocking=True)
    return AdapterTiles(torch.cat(list(rows)), table, torch.tensor(scales).to(device, non_blocking=True))


def part_table(a: Tensor, factors: Tensor, parts: Sequence[tuple[Tensor, int, int, int]]) -> Tensor:
    """Returns a table of a product's parts for the kernels, [parts, PART_FIELDS] int64. The table has the addresses of
    the tensors, so it is valid only as long as the tensors exist.

    a [all ranks, K]; factors [N] float32
    parts: for each part B [columns, TILE_RANKS * n], its first rank, how many ranks it has, and its first column
    """
    for b, first_rank, ranks, column in parts:
        assert b.is_contiguous() and b.shape[1] == cdiv(ranks, TILE_RANKS) * TILE_RANKS
        assert first_rank + ranks <= len(a) and column + len(b) <= len(factors)
    assert a.is_contiguous() and factors.is_contiguous() and factors.dtype == torch.float32
    fields = [
        (a.data_ptr(), b.data_ptr(), factors.data_ptr(), first_rank, ranks, column, len(b))
        for b, first_rank, ranks, column in parts
    ]
    return torch.tensor(fields, dtype=torch.int64).to(a.device)


@triton.jit
def _load_tile(order_ptr, tiles_ptr, parts_ptr, parts, m, ROW_FIELDS: tl.constexpr, PART_FIELDS: tl.constexpr):
    """Returns the adapter of the program's tile, the indices of the tile's rows in `order`, these rows, which of these
    rows exist, and the address of the part that the program computes.
    """
    tile, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    adapter = tl.load(tiles_ptr + tile * ROW_FIELDS)
    places, mask = tl.load(tiles_ptr + tile * ROW_FIELDS + 1) + m, m < tl.load(tiles_ptr + tile * ROW_FIELDS + 2)
    rows = tl.load(order_ptr + places, mask=mask, other=0)
    return adapter, places.to(tl.int64), rows, mask, parts_ptr + (adapter * parts + part) * PART_FIELDS


@triton.jit
def _multiply_a_kernel(
    x_ptr, low_ptr, order_ptr, tiles_ptr, parts_ptr, parts, depth, x_stride, low_stride,
    ROW_FIELDS: tl.constexpr, PART_FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiplies rows by A. Each program multiplies the rows of a tile by BLOCK_N ranks of a part's A."""
    m, n, k = tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    _, places, rows, mask_m, part_ptr = _load_tile(order_ptr, tiles_ptr, parts_ptr, parts, m, ROW_FIELDS, PART_FIELDS)
    ranks = tl.load(part_ptr + 4)
    if tl.program_id(1) * BLOCK_N >= ranks:
        return
    first_rank = tl.load(part_ptr + 3)
    a_ptr = tl.load(part_ptr).to(tl.pointer_type(x_ptr.dtype.element_ty))
    acc = accumulate_chain(
        a_ptr + (first_rank + n)[:, None] * depth + k[None, :], x_ptr + rows[None, :] * x_stride + k[:, None],
        n < ranks, mask_m, 0, depth, depth, 0.0, 0.0, False, 0, False, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    at = low_ptr + places[None, :] * low_stride + (first_rank + n)[:, None]
    tl.store(at, acc.to(low_ptr.dtype.element_ty), mask=(n < ranks)[:, None] & mask_m[None, :])


@triton.jit
def _add_b_kernel(
    low_ptr, y_ptr, order_ptr, tiles_ptr, parts_ptr, scales_ptr, parts, low_stride, y_stride,
    ROW_FIELDS: tl.constexpr, PART_FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiplies by B and adds to y. Each program adds BLOCK_N columns of a part to the rows of a tile."""
    m, n, k = tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    adapter, places, rows, mask_m, part_ptr = _load_tile(
        order_ptr, tiles_ptr, parts_ptr, parts, m, ROW_FIELDS, PART_FIELDS
    )
    columns = tl.load(part_ptr + 6)
    if tl.program_id(1) * BLOCK_N >= columns:
        return
    first_rank, ranks, column = tl.load(part_ptr + 3), tl.load(part_ptr + 4), tl.load(part_ptr + 5)
    padded = tl.cdiv(ranks, BLOCK_K) * BLOCK_K
    mask_n = n < columns
    b_ptr = tl.load(part_ptr + 1).to(tl.pointer_type(low_ptr.dtype.element_ty))
    acc = accumulate_chain(
        b_ptr + n[:, None] * padded + k[None, :],
        low_ptr + places[None, :] * low_stride + (first_rank + k)[:, None],
        mask_n, mask_m, 0, ranks, ranks, 0.0, 0.0, False, 0, False, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    factors_ptr = tl.load(part_ptr + 2).to(tl.pointer_type(tl.float32))
    factors = tl.load(factors_ptr + column + n, mask=mask_n, other=0.0)
    added = acc * factors[:, None] * tl.load(scales_ptr + adapter)
    at, mask = y_ptr + rows[None, :] * y_stride + (column + n)[:, None], mask_n[:, None] & mask_m[None, :]
    y = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all threads of the program must have loaded y before a thread stores
    tl.store(at, (y + added).to(y_ptr.dtype.element_ty), mask=mask)


def add_products_triton(y: Tensor, x: Tensor, tiles: AdapterTiles, tables: Sequence[Tensor], ranks: int) -> None:
    """Adds to rows of y [T, N] the products of x [T, K] with their adapters. Sums are in float32 and rounded once.

    tables: the part_table of each adapter in `tiles`. All tables must have the same number of parts; parts without
        columns may fill up a table.
    ranks: the largest number of rows of an adapter's A
    """
    assert len({len(table) for table in tables}) == 1
    launch_products(y, x, tiles, tables[0] if len(tables) == 1 else torch.cat(list(tables)), len(tables[0]), ranks)


def launch_products(y: Tensor, x: Tensor, tiles: AdapterTiles, fields: Tensor, parts: int, ranks: int) -> None:
    """Computes add_products_triton. fields [adapters * parts, PART_FIELDS] int64: the tables of all adapters, each with
    `parts` parts
    """
    assert x.stride(1) == y.stride(1) == 1
    count = len(tiles.tiles)
    low = torch.empty(len(tiles.order), ranks, dtype=x.dtype, device=x.device)
    given = {"ROW_FIELDS": ROW_FIELDS, "PART_FIELDS": PART_FIELDS, "BLOCK_M": TILE_ROWS, "enable_fp_fusion": False}
    _multiply_a_kernel[(count * parts, cdiv(ranks, TILE_RANKS))](
        x, low, tiles.order, tiles.tiles, fields, parts, x.shape[1], x.stride(0), ranks,
        BLOCK_N=TILE_RANKS, BLOCK_K=TILE_DEPTH, **given,
    )  # fmt: skip
    _add_b_kernel[(count * parts, cdiv(y.shape[1], TILE_COLUMNS))](
        low, y, tiles.order, tiles.tiles, fields, tiles.scales, parts, ranks, y.stride(0),
        BLOCK_N=TILE_COLUMNS, BLOCK_K=TILE_RANKS, **given,
    )  # fmt: skip


# Adds the products of all adapters of a step to a linear layer, in one launch.

Changing = tuple[Tensor, Product, float]  # (indices of rows, the product to add to them, the scale of the adapter)


class ProductsOnGpu:
    """Adds the products of the adapters of a step. Caches tables of rows, because most layers use the same ones."""

    def __init__(self) -> None:
        self._tiles: dict[tuple[tuple[int, ...], bool], AdapterTiles] = {}

    def add(self, y: Tensor, x: Tensor, changing: Sequence[Changing], *, together: bool = False) -> None:
        """Adds the products of rows of x [T, K] to the same rows of y [T, N].

        changing: the tensors of row indices must live as long as this object, because the cache uses their id().
        together: whether x and y have only the rows of these adapters, ordered by adapter
        """
        key = tuple(id(rows) for rows, *_ in changing), together
        if (tiles := self._tiles.get(key)) is None:
            tiles = self._tiles[key] = _tiles(changing, together)
        add_products_triton(y, x, tiles, _tables(changing), max(product.ranks for _, product, _ in changing))


def _tiles(changing: Sequence[Changing], together: bool) -> AdapterTiles:
    rows = [rows for rows, *_ in changing]
    counts = [len(each) for each in rows]
    own = torch.arange(sum(counts), device=rows[0].device).split_with_sizes(counts) if together else rows
    return tiles_of(own, [scale for *_, scale in changing])


def _tables(changing: Sequence[Changing]) -> list[Tensor]:
    tables = [product.table for _, product, _ in changing if product.table is not None]
    most = max(map(len, tables))
    return [
        torch.nn.functional.pad(table, (0, 0, 0, most - len(table))) if len(table) < most else table for table in tables
    ]
