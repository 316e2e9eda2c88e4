"""Defines a test case for a kernel, and makes random inputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.environment import Environment

EPS = 1e-6
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A test case: two functions whose results are compared. Both return tensors of the same shapes.

    got: runs the kernel in the format under test.
    want: runs the kernel's PyTorch form in fp32.
    wrong: only in cases that sample ids. Returns [R] bool, true where rounding cannot explain that two ids differ.
    """

    label: str
    got: Callable[[], Tensors]
    want: Callable[[], Tensors]
    wrong: Callable[[Tensors, Tensors], Tensor] | None = None


class RandomTensors:
    """Makes random tensors on one device, with a default dtype."""

    def __init__(self, env: Environment, dtype: torch.dtype | None = None) -> None:
        self._generator, self._dtype, self.device = env.generator(), dtype or env.dtype, env.device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.randn(*shape, generator=self._generator, device=self.device)
        return made.to(dtype or self._dtype)

    def ids(self, count: int, below: int) -> Tensor:
        """Returns distinct random ids, [count] int64."""
        return torch.randperm(below, generator=self._generator, device=self.device)[:count]
