"""The traffic of a simulated fleet, and when its workers and frontends die."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

Arrival = tuple[float, list[int], int]  # time in seconds, prompt ids, maximum of new tokens


@dataclass(frozen=True)
class Workload:
    """Requests with shared prefixes. Rates are per second and per worker (or per frontend, for frontend_deaths)."""

    groups: float  # number of different prefixes per worker
    prefix: int  # tokens that all prompts of a group begin with
    tail: tuple[int, int]  # smallest and largest number of tokens after the prefix of a prompt
    output: int
    rate: float
    burst: int = 1  # how many requests arrive together
    worker_deaths: float = 0.0
    frontend_deaths: float = 0.0

    def arrivals(self, workers: int, seconds: float, draw: random.Random) -> Iterator[Arrival]:
        groups = max(1, round(self.groups * workers))
        heads = [[draw.randrange(300, 32_000) for _ in range(self.prefix)] for _ in range(groups)]
        at = 0.0
        while (at := at + draw.expovariate(self.rate * workers / self.burst)) < seconds:
            for _ in range(self.burst):
                tail = [draw.randrange(300, 32_000) for _ in range(draw.randint(*self.tail))]
                yield at, draw.choice(heads) + tail, self.output

    def deaths(self, workers: int, frontends: int, seconds: float, draw: random.Random) -> "Deaths":
        """Draws random times of death, each with the index of the process that dies."""
        return Deaths(
            list(_times(self.worker_deaths, workers, seconds, draw)),
            list(_times(self.frontend_deaths, frontends, seconds, draw)),
        )


@dataclass(frozen=True)
class Deaths:
    """The deaths of workers and of frontends, as pairs of time in seconds and index."""

    workers: list[tuple[float, int]]
    frontends: list[tuple[float, int]]


def _times(rate: float, count: int, seconds: float, draw: random.Random) -> Iterator[tuple[float, int]]:
    at = 0.0
    while rate and (at := at + draw.expovariate(rate * count)) < seconds:
        yield at, draw.randrange(count)


WORKLOADS = {
    "agents": Workload(groups=2, prefix=2048, tail=(50, 250), output=24, rate=0.9),
    "chat": Workload(groups=0.5, prefix=320, tail=(20, 400), output=48, rate=1.0),
    "bursts": Workload(groups=2, prefix=1024, tail=(50, 250), output=24, rate=0.9, burst=8),
    "documents": Workload(groups=0.5, prefix=320, tail=(20, 3200), output=96, rate=0.25),
    "failures": Workload(
        groups=0.5, prefix=320, tail=(20, 400), output=48, rate=0.7, worker_deaths=0.03, frontend_deaths=0.1
    ),
}
