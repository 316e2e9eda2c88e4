"""Who asks for what, and when: plain data. Workloads of others fit in, and random traffic is made here."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

VOCAB = 32_000
FIRST_ID = 300  # above special tokens and single bytes


class Asks(Protocol):
    """One request of a traffic: when (seconds after the start), its prompt's ids, and how many tokens it wants."""

    @property
    def at(self) -> float: ...
    @property
    def prompt(self) -> list[int] | str: ...
    @property
    def max_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request on its way; it ends after `max_tokens` and never before."""

    at: float
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """`arrivals` in any order; `sequential`: each is sent when the one before has ended, not before its time."""

    arrivals: tuple[Arrival, ...]
    sequential: bool = False

    @classmethod
    def of(cls, calls: Iterable[Asks], sequential: bool = False) -> "Traffic":
        """From anybody's requests; raises ValueError for one whose prompt is text and not ids."""
        return cls(tuple(_arrival(call) for call in calls), sequential)

    def faster(self, times: float) -> "Traffic":
        """The same requests, arriving `times` as fast."""
        moved = (Arrival(one.at / times, one.prompt, one.max_tokens) for one in self.arrivals)
        return Traffic(tuple(moved), self.sequential)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Poisson arrivals: `rate` a second for `duration` seconds, lengths uniform between bounds (inclusive)."""

    rate: float
    duration: float
    prompt: tuple[int, int] = (128, 1024)
    output: tuple[int, int] = (64, 256)
    vocab: int = VOCAB
    seed: int = 0

    def make(self) -> Traffic:
        """The same traffic every time; no two prompts share a beginning but by chance."""
        rng, at, arrivals = random.Random(self.seed), 0.0, []
        while (at := at + rng.expovariate(self.rate)) < self.duration:
            prompt = [rng.randrange(FIRST_ID, self.vocab) for _ in range(rng.randint(*self.prompt))]
            arrivals.append(Arrival(at, prompt, rng.randint(*self.output)))
        return Traffic(tuple(arrivals))


def _arrival(call: Asks) -> Arrival:
    if isinstance(call.prompt, str):
        raise ValueError("a simulation has no tokenizer: prompts must be ids")
    return Arrival(call.at, call.prompt, call.max_tokens)
