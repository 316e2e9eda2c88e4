"""Traffic as plain data: requests and their arrival times, from the benchmarks' workloads or at random."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

VOCAB = 32_000
FIRST_ID = 300  # lower ids are special tokens and single bytes


class TimedRequest(Protocol):
    """A request of a workload. at: seconds after the start. prompt: token ids or text. max_tokens: limit of its
    output"""

    @property
    def at(self) -> float: ...
    @property
    def prompt(self) -> list[int] | str: ...
    @property
    def max_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives; its output ends after `max_tokens` and never before."""

    at: float
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests to replay. arrivals: in any order. sequential: whether a request also waits until the previous request
    has ended."""

    arrivals: tuple[Arrival, ...]
    sequential: bool = False

    @classmethod
    def of(cls, requests: Iterable[TimedRequest], sequential: bool = False) -> "Traffic":
        """Makes traffic of these requests; raises ValueError for a prompt that is text and not ids."""
        return cls(tuple(_arrival(request) for request in requests), sequential)

    def faster(self, times: float) -> "Traffic":
        """Returns the same requests, which arrive `times` times as fast."""
        arrivals = tuple(Arrival(one.at / times, one.prompt, one.max_tokens) for one in self.arrivals)
        return Traffic(arrivals, self.sequential)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Poisson arrivals at `rate` per second for `duration` seconds, with lengths uniform between bounds (inclusive)."""

    rate: float
    duration: float
    prompt: tuple[int, int] = (128, 1024)
    output: tuple[int, int] = (64, 256)
    vocab: int = VOCAB
    seed: int = 0

    def make(self) -> Traffic:
        """Returns the same traffic every time; prompts share a beginning only by chance."""
        rng, at, arrivals = random.Random(self.seed), 0.0, []
        while (at := at + rng.expovariate(self.rate)) < self.duration:
            prompt = [rng.randrange(FIRST_ID, self.vocab) for _ in range(rng.randint(*self.prompt))]
            arrivals.append(Arrival(at, prompt, rng.randint(*self.output)))
        return Traffic(tuple(arrivals))


def _arrival(request: TimedRequest) -> Arrival:
    if isinstance(request.prompt, str):
        raise ValueError("a simulation has no tokenizer: prompts must be ids")
    return Arrival(request.at, request.prompt, request.max_tokens)
