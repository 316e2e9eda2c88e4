"""Adds adapters' products to linear layers on a GPU, all adapters of a step in one launch (lora/triton.py)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.lora.loaded import Product
from worker.lora.triton import AdapterTiles, add_products_triton, tiles_of

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
