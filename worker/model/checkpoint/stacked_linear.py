"""Describes several linears of a checkpoint that become one linear in memory."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.model.checkpoint.stored_weight import PlainWeight, Shape

WEIGHT, BIAS = ".weight", ".bias"


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """Describes linears of the checkpoint whose rows are concatenated into one linear."""

    modules: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    bias: bool
    order: Tensor | None = None  # the row order in memory, within each module; None: the checkpoint's order
    transposed: bool | None = False  # if true, plain numbers are stored as [inputs, outputs]; None: their shape tells
    exact: bool = False  # if true, the weight always stays in full precision
    kept: tuple[Tensor, ...] | None = None  # for each module the rows that are used, as indices into `order`; None: all
    apart: int = 0  # how many rows at the end of the first module (in memory order) become a linear of their own

    @property
    def first_rows(self) -> int:
        """How many rows of the first module are used."""
        return self.rows[0] if self.kept is None else len(self.kept[0])

    @property
    def kept_rows(self) -> int:
        """How many rows of all modules are used."""
        return sum(self.rows if self.kept is None else map(len, self.kept))

    def orders(self, device: torch.device) -> list[Tensor | slice]:
        """Returns for each module an index that selects its used rows in memory order."""
        if self.kept is not None:
            whole = replace(self, kept=None).orders(device)
            rows = [kept.to(device) for kept in self.kept]
            return [own if isinstance(each, slice) else each[own] for each, own in zip(whole, rows, strict=True)]
        if self.order is None:
            return [slice(None)] * len(self.modules)
        starts = [sum(self.rows[:i]) for i in range(len(self.rows))]
        parts = self.order.to(device).split_with_sizes(self.rows)
        return [part - start for part, start in zip(parts, starts, strict=True)]

    def weights(self, prefix: str) -> list[tuple[str, Shape, bool | None]]:
        """Returns the arguments of WeightSource.weight for each module: name, shape, and `transposed`."""
        parts = zip(self.modules, self.rows, strict=True)
        return [(f"{prefix}{module}{WEIGHT}", (rows, self.columns), self.transposed) for module, rows in parts]

    def biases(self, prefix: str) -> list[PlainWeight]:
        parts = zip(self.modules, self.rows, strict=True)
        return [PlainWeight(f"{prefix}{module}{BIAS}", (rows,)) for module, rows in parts] if self.bias else []
