"""A test case for a kernel, and random inputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.environment import Environment

EPS = 1e-6
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """got: the kernel, in the format under test. want: its PyTorch form in fp32. Both return tensors of the same
    shapes."""

    label: str
    got: Callable[[], Tensors]
    want: Callable[[], Tensors]


class RandomTensors:
    """Random tensors on one device, of one dtype by default."""

    def __init__(self, env: Environment, dtype: torch.dtype | None = None) -> None:
        self._generator, self._dtype, self.device = env.generator(), dtype or env.dtype, env.device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.randn(*shape, generator=self._generator, device=self.device)
        return made.to(dtype or self._dtype)

    def ids(self, count: int, below: int) -> Tensor:
        """Distinct ids, [count] int64."""
        return torch.randperm(below, generator=self._generator, device=self.device)[:count]
