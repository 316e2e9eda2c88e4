"""What every measurement is given: where it runs, how much, for how long, and what is known so far."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from bench.gpu.clock import Clock
from bench.gpu.shapes import CONFIGS, Sizes
from worker.model.families import spec_from_config
from worker.model.spec import ModelSpec

Row = dict[str, str | float]
NEEDS_CUDA = "needs CUDA"
FEW = 12  # of how many kinds one is tried without a GPU
T = TypeVar("T")


@dataclass(slots=True)
class Place:
    """`facts`: what floors found (bytes and operations a second), for all that follow."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    clock: Clock
    models: tuple[str, ...]
    folder: Path  # for files, gone afterwards
    seed: int
    deadline: float  # seconds since the epoch
    trace: Path | None = None
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def left(self) -> float:
        return self.deadline - time.time()

    def short(self, need_s: float) -> str:
        """Why something that takes so long is left out; empty: there is time for it."""
        left = self.left()
        return "" if left >= need_s else f"left out: {max(left, 0):.0f} s left, it takes about {need_s:.0f}"

    def some(self, kinds: Iterable[T]) -> list[T]:
        """All of them where there is a GPU to check; a few elsewhere, to see that the checks run."""
        return list(kinds)[:: 1 if self.cuda else FEW]

    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed)

    def share_of_copy(self, size: float, seconds: float) -> float:
        """Percent of the copy bandwidth, reading or writing `size` bytes in so many seconds."""
        return 100 * size / seconds / self.facts.get("copy", math.nan)

    def share_of_gemm(self, operations: float, seconds: float) -> float:
        return 100 * operations / seconds / self.facts.get("gemm", math.nan)


def spec_of(model: str, layers: int = 0) -> ModelSpec:
    """A model of the catalogue, with only so many layers if `layers` is not 0."""
    config = dict(CONFIGS[model])
    if layers:
        config["num_hidden_layers"] = min(layers, config["num_hidden_layers"])
    return spec_from_config(config)
