"""The cost model: a step's time as a linear function of four counts; with presets, and a fit to measured steps.

A step computes `tokens` rows of `sequences` chunks, and reads `kv_tokens` K/V positions (the sum of the chunks' context
lengths). Its modelled time is

    overhead + token * tokens + kv_token * kv_tokens + sequence * sequences          seconds

The model ignores two effects: a chunk's attention grows with length times context, not with their sum, and on a GPU
small steps hide their arithmetic behind reading the weights. In the second case the modelled time is too long.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from shared.config.declaration import ConfigError
from worker.scheduler.sequence import Plan


class Observation(NamedTuple):
    """One measured step."""

    tokens: int
    kv_tokens: int
    sequences: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds per step (overhead), per computed token, per K/V position read, and per sequence in the step."""

    overhead: float
    token: float
    kv_token: float
    sequence: float = 0.0

    def of(self, plan: Plan) -> float:
        """Returns the seconds that the plan's step takes."""
        kv_tokens = sum(chunk.start + chunk.length for chunk in plan.chunks)
        return self.seconds(plan.tokens, kv_tokens, len(plan.chunks))

    def seconds(self, tokens: int, kv_tokens: int, sequences: int) -> float:
        return self.overhead + self.token * tokens + self.kv_token * kv_tokens + self.sequence * sequences


# The times of Llama-3.2-3B in bf16 on one H200 come from two measured limits: 4.3 TB/s and 790 TFLOP/s.
_H200_BYTES_S, _H200_FLOP_S = 4.3e12, 790e12
_PARAMETERS = 3.21e9
_KV_BYTES = 28 * 2 * 8 * 128 * 2  # per token: layers * (K, V) * K/V heads * head_dim * bytes

PRESETS = {
    # calibrated on two cores of a shared Sapphire Rapids Xeon, bf16: within 20 % of each step
    "cpu-qwen3-0.6b": CostModel(overhead=0.0462, token=8.72e-4, kv_token=1.02e-5),
    "h200-3b": CostModel(
        # all weights once a step, at 80 % of the bandwidth: 2 bytes * 3.21e9 / (0.8 * 4.3e12) = 1.87 ms
        overhead=2 * _PARAMETERS / (0.8 * _H200_BYTES_S),
        # a multiplication and an addition per parameter, at 60 % of the rate: 2 * 3.21e9 / (0.6 * 790e12) = 13.5 us
        token=2 * _PARAMETERS / (0.6 * _H200_FLOP_S),
        # the keys and values of one position, at 80 % of the bandwidth: 114,688 / (0.8 * 4.3e12) = 33 ns
        kv_token=_KV_BYTES / (0.8 * _H200_BYTES_S),
        # scheduling, packing and publishing on the host: 1.2 ms at 256 sequences
        sequence=1.2e-3 / 256,
    ),
}
GPU_PRESETS = frozenset({"h200-3b"})


def fit(steps: Sequence[Observation]) -> CostModel:
    """Returns the cost model with the least squared relative error over `steps`; no coefficient is negative.

    The error is relative, so that a decode of a few milliseconds counts as much as a prompt of seconds. A coefficient
    that the plain solution makes negative is set to zero and the rest fitted again. Raises ValueError for fewer
    than four steps, or steps without a duration.
    """
    import numpy as np

    if len(steps) < 4 or min(step.seconds for step in steps) <= 0:
        raise ValueError("a fit needs four steps at least, each with a duration")
    seconds = np.array([step.seconds for step in steps])
    counts = np.array([(1, step.tokens, step.kv_tokens, step.sequences) for step in steps], float)
    scale = counts.max(axis=0)
    rows = counts / scale / seconds[:, None]
    columns = list(range(4))
    while True:
        solution = np.linalg.lstsq(rows[:, columns], np.ones(len(steps)), rcond=None)[0]
        if not columns or solution.min() >= 0:
            break
        del columns[int(solution.argmin())]
    coefficients = dict(zip(columns, solution, strict=True))
    return CostModel(*(float(coefficients.get(index, 0.0) / scale[index]) for index in range(4)))


def worst_error(cost: CostModel, steps: Sequence[Observation]) -> float:
    """Returns the largest relative error of `cost` over `steps`."""
    return max(abs(cost.seconds(*step[:3]) / step.seconds - 1) for step in steps)


def save(path: Path, cost: CostModel, steps: Sequence[Observation], **about: str) -> None:
    """Writes a file for load(): the coefficients, the measured steps, and `about`, which describes the measurement."""
    content = {"about": about, "cost": asdict(cost), "steps": [step._asdict() for step in steps]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def load(name: str) -> CostModel:
    """Returns the preset `name`, or reads the file `name`. Raises ConfigError.

    The file holds a cost model, {"cost": {...}}, or measured steps to which one is fitted, {"steps": [...]}.
    """
    if name in PRESETS:
        return PRESETS[name]
    try:
        return _parse(json.loads(Path(name).read_text()))
    except FileNotFoundError:
        raise ConfigError(f"--cost {name} is neither a file nor one of {', '.join(PRESETS)}") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"--cost {name} cannot be read: {type(error).__name__}: {error}") from error


def _parse(content: dict[str, Any]) -> CostModel:
    if "cost" not in content:
        return fit([Observation(**step) for step in content["steps"]])
    cost = CostModel(**{name: float(value) for name, value in content["cost"].items()})
    values = asdict(cost).values()
    if not all(0 <= value < inf for value in values) or cost.overhead + cost.token == 0:
        raise ValueError("coefficients must be finite and not negative, and a step must take some time")
    return cost
