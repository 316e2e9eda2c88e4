"""The operations of a rank that has some rows of each weight: around each product, all ranks gather their columns.

Only linears behind a mixer or an activation need columns of other ranks: their inputs are gathered before the product,
and their outputs after it. Every product thus adds up the same numbers in the same order as without ranks. Nothing is
ever summed across ranks. These are the places at which the C library exchanges columns, too (csrc/decoder.c).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import Tensor

from worker.kernels.linear import PackedLinear
from worker.kernels.operations import Exchange, Operations

Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class OperationsOfRank(Operations):
    """Operations that gather. columns: [T, own columns] → [T, columns of all ranks], in the order of the ranks."""

    columns: Gather

    def all_columns(self, x: Tensor) -> Tensor:
        return self.columns(x)

    def linear_add_norm(
        self, x: Tensor, packed: PackedLinear, residual: Tensor, weight: Tensor | None, eps: float, **how: Any
    ) -> tuple[Tensor, Tensor]:
        """x [T, own inputs], packed: own rows of the weight. residual and the results [T, H]: whole."""
        product = self.columns(self.linear(self.columns(x), packed))
        return self.add_rms_norm(product, residual, weight, eps, **how)


def gathering(rank: int, count: int, columns: Gather) -> Exchange:
    """Returns the exchange of a decoder (model/decoder.py) that has the share `rank` of `count`."""

    def exchange(plain: Operations) -> Operations:
        own = {item.name: getattr(plain, item.name) for item in fields(Operations)}
        own["experts"] = partial(_experts, plain.experts, rank, count, columns)
        return OperationsOfRank(**own, columns=columns)

    return exchange


def rehearsing(count: int) -> Exchange:
    """Returns an exchange that asks no other rank: each rank's columns stand in for those of all `count` ranks.

    Checks and measurements before serving use it, because each rank does them in its own time. It takes as much memory
    as the exchange does.
    """
    return gathering(0, count, lambda own: side_by_side(own.repeat(count, 1, 1)))


def side_by_side(parts: Tensor) -> Tensor:
    """Returns the columns of all ranks [T, ranks * N], which come as [ranks, T, N]."""
    ranks, rows, columns = parts.shape
    return parts.transpose(0, 1).reshape(rows, ranks * columns)


def _experts(
    plain: Callable[..., Tensor], rank: int, count: int, columns: Gather, h: Tensor, *args: Any,
    add: Tensor | None = None, **how: Any,
) -> Tensor:  # fmt: skip
    """Computes the operation `experts`. add [T, H]: of which each rank adds its own columns"""
    if add is not None:
        size = add.shape[1] // count
        add = add[:, rank * size : (rank + 1) * size]
    return columns(plain(h, *args, add=add, gather=columns, **how))
