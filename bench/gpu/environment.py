"""The input of every measurement: device, sizes, clock, remaining time, and measured limits of the device."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from bench.gpu.clock import Clock
from bench.gpu.shapes import CONFIGS, Sizes

if TYPE_CHECKING:
    from worker.spec import ModelSpec

Row = dict[str, str | float]
NEEDS_CUDA = "needs CUDA"
CPU_STRIDE = 12  # without a GPU, only every 12th case is run
T = TypeVar("T")


@dataclass(slots=True)
class Environment:
    """The input of a measurement.
    limits: bytes and operations per second that section `floors` measured; later sections use them."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    clock: Clock
    models: tuple[str, ...]
    folder: Path  # temporary files
    seed: int
    deadline: float  # seconds since the epoch
    trace: Path | None = None
    tiles: Path | None = None  # where the section `sweep` writes the best tiles
    limits: dict[str, float] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def seconds_left(self) -> float:
        return self.deadline - time.time()

    def skip_reason(self, need_s: float) -> str:
        """Returns why a measurement of `need_s` seconds is skipped, or an empty string if there is time for it."""
        seconds_left = self.seconds_left()
        return (
            ""
            if seconds_left >= need_s
            else f"left out: {max(seconds_left, 0):.0f} s left, it takes about {need_s:.0f}"
        )

    def sample(self, kinds: Iterable[T]) -> list[T]:
        """Returns all `kinds` on a GPU. On the CPU, returns a few, which suffice to test the checks themselves."""
        return list(kinds)[:: 1 if self.cuda else CPU_STRIDE]

    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed)

    def share_of_copy(self, size: float, seconds: float) -> float:
        """Returns the rate of `size` bytes in `seconds` seconds, as a percentage of the measured bandwidth of a
        copy."""
        return 100 * size / seconds / self.limits.get("copy", math.nan)

    def share_of_gemm(self, operations: float, seconds: float) -> float:
        return 100 * operations / seconds / self.limits.get("gemm", math.nan)


def spec_of(model: str, layers: int = 0) -> "ModelSpec":
    """Returns the spec of a model in CONFIGS. layers: the maximum number of layers; 0 means all."""
    from worker.models.config import spec_from_config  # imported here: section `floors` runs without it

    config = dict(CONFIGS[model])
    if layers:
        config["num_hidden_layers"] = min(layers, config["num_hidden_layers"])
    return spec_from_config(config)
