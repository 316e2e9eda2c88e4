"""What a case of a kernel's check is, and fresh random inputs for it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.context import Place

EPS = 1e-6
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """`got` in the format under test, `want` from its twin in fp32; tensors of the same shapes."""

    label: str
    got: Callable[[], Tensors]
    want: Callable[[], Tensors]


class Fresh:
    """Random tensors on one device, in one format unless said."""

    def __init__(self, place: Place, dtype: torch.dtype | None = None) -> None:
        self._generator, self._dtype, self.device = place.generator(), dtype or place.dtype, place.device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.randn(*shape, generator=self._generator, device=self.device)
        return made.to(dtype or self._dtype)

    def ids(self, count: int, below: int) -> Tensor:
        """Distinct ones, [count] int64."""
        return torch.randperm(below, generator=self._generator, device=self.device)[:count]
