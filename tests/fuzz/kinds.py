"""The kinds of input that are fuzzed. A new kind is a row here: any object with a name and a Fuzzer's `__call__`."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from tests.fuzz import configs
from tests.fuzz.bodies import BODIES
from tests.fuzz.frames import FRAMES
from tests.fuzz.fuzzer import Attempt, Failure, Fuzzer, Input
from tests.fuzz.grammars import GRAMMARS
from tests.fuzz.heads import HEADS
from tests.fuzz.hostile import HOSTILE
from tests.fuzz.posts import posting
from tests.fuzz.watch import Watch


@dataclass(frozen=True)
class Kind:
    """A fuzzer and its weight. Kinds share the time in proportion to their weights."""

    fuzzer: Fuzzer
    weight: int

    @property
    def name(self) -> str:
        return self.fuzzer.name


def _config(rng: random.Random) -> Input:
    return {"seed": rng.randrange(2**32)}


@contextmanager
def _configs(watch: Watch) -> Iterator[Attempt]:
    configs.configs()

    def attempt(input: Input) -> None:
        counts = configs.run(input["seed"], 60.0, most=1)
        if counts.found:
            raise Failure("; ".join(counts.found))

    yield attempt


CONFIGS = Fuzzer("configs", _config, _configs)
KINDS = (Kind(HEADS, 3), Kind(BODIES, 3), Kind(GRAMMARS, 3), Kind(FRAMES, 2), Kind(HOSTILE, 2), Kind(CONFIGS, 1))


def patient(kind: Kind, seconds: float) -> Kind:
    """Returns the kind with a limit of `seconds` for the answer to a body; other clients do not wait longer."""
    if kind.fuzzer not in (BODIES, GRAMMARS):
        return kind
    return Kind(replace(kind.fuzzer, opened=partial(posting, patience_s=seconds), patience_s=seconds), kind.weight)
