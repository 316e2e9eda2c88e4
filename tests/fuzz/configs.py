"""Fuzzes configs of every family by replacing one value: the result is a spec or a refusal of one sentence, at once.

`python -m tests.fuzz.configs SEED SECONDS` runs for the given time.
"""

import json
import random
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from tests.checkpoints import KINDS
from worker.checkpoint.checkpoint import CheckpointError
from worker.models.config import spec_from_config
from worker.models.config_values import ROPE, VALUES

HANG_S = 2.0
LONGEST = 1500  # characters of the longest refusal, which lists all families for an unknown model_type
VALUES_TRIED: tuple[Any, ...] = (
    None, 0, -1, 1, 2, 3, 7, 33, 576, 2**20 + 1, 10**9, 2**31, 2**63, 10**400, 1.5, -0.5, 0.0, 1e300, float("nan"),
    float("inf"), float("-inf"), True, False, "", "x", "x" * 10**5, [], [1], [None], [-1], ["sliding_attention"],
    ["full_attention"] * 10**4, [0] * 10**6, {}, {"full_attention": 3}, {"rope_type": "yarn"}, {"0": {"head_dim": 3}},
    {"0": 5}, {"rope_type": "linear", "factor": -1},
)  # fmt: skip
KINDS_OF_ROPE = ("default", "dynamic", "linear", "proportional", "llama3", "yarn", "longrope")


@dataclass
class Counts:
    """The number of configs that were tried, by result. found: a line for each crash and hang"""

    inputs: int = 0
    refused: int = 0
    crashes: int = 0
    hangs: int = 0
    found: list[str] = field(default_factory=list)


@cache
def configs() -> Mapping[str, dict[str, Any]]:
    """Returns the config of each kind of tiny checkpoint."""
    with torch.device("meta"):
        return {name: json.loads(kind.model().config.to_json_string(use_diff=False)) for name, kind in KINDS.items()}


def changed(dice: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields configs for ever, each with one value replaced, and a description of the replacement."""
    every = configs()
    names = {kind: sorted(VALUES.keys() | config.keys()) for kind, config in every.items()}
    while True:
        kind, value = dice.choice(sorted(every)), dice.choice(VALUES_TRIED)
        if dice.random() < 0.3:
            name, rope = dice.choice(sorted(ROPE)), dice.choice(KINDS_OF_ROPE)
            settings = {"rope_type": rope, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            yield f"{kind}: {rope}.{name}", {**every[kind], "rope_parameters": {**settings, name: value}}
        else:
            name = dice.choice(names[kind])
            yield f"{kind}: {name}", {**every[kind], name: value}


def run(seed: int, seconds: float, most: int = sys.maxsize) -> Counts:
    """Tries configs, which `seed` decides, for `seconds` or until `most` configs were tried."""
    counts, end = Counts(), time.monotonic() + seconds
    for what, config in changed(random.Random(seed)):
        if time.monotonic() > end or counts.inputs >= most:
            return counts
        counts.inputs += 1
        began = time.process_time()
        try:
            spec_from_config(config)
        except CheckpointError as refusal:
            counts.refused += 1
            if len(str(refusal)) > LONGEST or "\n" in str(refusal):
                counts.crashes += 1
                counts.found.append(f"{what}: not a sentence: {str(refusal)[:200]}")
        except Exception as error:
            counts.crashes += 1
            counts.found.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
        if time.process_time() - began > HANG_S:
            counts.hangs += 1
            counts.found.append(f"{what}: slow")
    return counts


if __name__ == "__main__":
    result = run(int(sys.argv[1]), float(sys.argv[2]))
    print(*result.found, result, sep="\n")
    sys.exit(1 if result.found else 0)
