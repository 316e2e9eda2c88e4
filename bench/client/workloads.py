"""The workloads, as data: requests and their send times.

Prompts are random ids, so they share no prefix unless a workload says so.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.client.load_client import Call

SEED = 42
WARM_UP = 2
FIRST_ID = 300  # lower ids are special tokens and single bytes
VOCAB = 1500  # every model has at least this many ids


@dataclass(frozen=True, slots=True)
class Scale:
    """Fits a workload to slower and faster machines: `rate` multiplies arrivals, `length` all lengths."""

    rate: float = 1.0
    length: float = 1.0

    def tokens(self, count: int) -> int:
        return max(1, round(count * self.length))


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    text: str
    calls: Callable[[random.Random, Scale, int], list[Call]]
    sequential: bool = False
    seed: int = SEED

    def make(self, vocab: int, scale: Scale) -> list[Call]:
        """Returns the same calls every time, with ids from FIRST_ID up to `vocab`."""
        return self.calls(random.Random(self.seed), scale, vocab)

    def warm_up(self, calls: list[Call]) -> list[Call]:
        """Returns copies of the first requests, with reversed prompts. The copies are sent one by one and not counted.
        Because of the reversal, no counted request finds its prompt or a shared prefix in the prefix cache."""
        return [replace(call, at=0.0, prompt=call.prompt[::-1]) for call in calls[:WARM_UP]]


def chosen(names: str) -> list[Workload]:
    """Returns the workloads with the given comma-separated names, or every one for `all`. Raises KeyError with an
    unknown name."""
    return list(WORKLOADS.values()) if names == "all" else [WORKLOADS[name] for name in names.split(",")]


def _ids(rng: random.Random, count: int, vocab: int) -> list[int]:
    """Returns random ids. Draws from `rng` once, whatever `count` is, so that a scale does not change later draws."""
    own = random.Random(rng.getrandbits(64))
    return [own.randrange(FIRST_ID, vocab) for _ in range(count)]


def _baseline(rng: random.Random, scale: Scale, vocab: int) -> list[Call]:
    return [Call(0.0, _ids(rng, scale.tokens(256), vocab), scale.tokens(256)) for _ in range(10)]


def _uniform(
    count: int, rate: float, prompt: tuple[int, int], new: tuple[int, int]
) -> Callable[[random.Random, Scale, int], list[Call]]:
    def calls(rng: random.Random, scale: Scale, vocab: int) -> list[Call]:
        return [
            Call(
                i / (rate * scale.rate) if rate else 0.0,
                _ids(rng, scale.tokens(rng.randint(*prompt)), vocab),
                scale.tokens(rng.randint(*new)),
            )
            for i in range(count)
        ]

    return calls


def _chunked_prefill(rng: random.Random, scale: Scale, vocab: int) -> list[Call]:
    at, calls = 0.0, []
    for _ in range(48):
        at += rng.expovariate(6.0 * scale.rate)
        bounds = (1024, 2048) if rng.random() < 0.75 else (64, 128)
        prompt = _ids(rng, scale.tokens(rng.randint(*bounds)), vocab)
        calls.append(Call(at, prompt, scale.tokens(rng.randint(64, 256))))
    return calls


def _prefix_caching(rng: random.Random, scale: Scale, vocab: int) -> list[Call]:
    prefix = _ids(rng, scale.tokens(1024), vocab)
    return [
        Call(
            i / (8.0 * scale.rate),
            prefix + _ids(rng, scale.tokens(rng.randint(32, 128)), vocab),
            scale.tokens(256),
        )
        for i in range(48)
    ]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("baseline", "10 one after another, 256 in, 256 out", _baseline, sequential=True),
        Workload(
            "continuous_batching",
            "32, 4 a second, 64 to 512 in, 64 to 256 out",
            _uniform(32, 4.0, (64, 512), (64, 256)),
        ),
        Workload(
            "paged_attention", "48 at once, 128 to 384 in, 128 to 256 out", _uniform(48, 0, (128, 384), (128, 256))
        ),
        Workload("chunked_prefill", "48, Poisson 6 a second, mostly 1024 to 2048 in, 64 to 256 out", _chunked_prefill),
        Workload("prefix_caching", "48, 8 a second, 1024 shared + 32 to 128 in, 256 out", _prefix_caching),
        Workload("mixed", "16 at once, 32 to 1024 in, 64 to 256 out", _uniform(16, 0, (32, 1024), (64, 256))),
        Workload("offline", "256 at once, 100 to 1024 in and out", _uniform(256, 0, (100, 1024), (100, 1024)), seed=0),
    )
}
