"""What the compute loop remembers of its recent past: rates over ten seconds, latencies of the last requests."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.messages import Quantiles

WINDOW_S = 10.0
LEAST_S = 0.5
SAMPLES = 1024


@dataclass(slots=True)
class Rate:
    """Tokens per second over the last WINDOW_S."""

    _events: deque[tuple[float, int]] = field(default_factory=deque)
    _sum: int = 0

    def add(self, now: float, count: int) -> None:
        self._events.append((now, count))
        self._sum += count
        self._forget(now)

    def per_second(self, now: float) -> float:
        self._forget(now)
        return self._sum / WINDOW_S

    def recent(self, now: float) -> float:
        """The same over the time since the first of them: what a burst does that has just begun."""
        self._forget(now)
        return self._sum / min(WINDOW_S, max(LEAST_S, now - self._events[0][0])) if self._events else 0.0

    def _forget(self, now: float) -> None:
        while self._events and self._events[0][0] < now - WINDOW_S:
            self._sum -= self._events.popleft()[1]


@dataclass(slots=True)
class Recent:
    """Quantiles of the last SAMPLES observations."""

    _values: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def add(self, value: float) -> None:
        self._values.append(value)

    def quantiles(self) -> Quantiles:
        values = sorted(self._values.copy())
        return Quantiles(*(quantile(values, q) for q in (0.50, 0.95, 0.99))) if values else Quantiles()


def quantile(ordered: list[float], q: float) -> float:
    """The nearest-rank quantile of ascending values; raises IndexError when there are none."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


@dataclass(slots=True)
class Stats:
    """Fed by the loop after each step."""

    prompt: Rate = field(default_factory=Rate)
    generation: Rate = field(default_factory=Rate)
    ttft: Recent = field(default_factory=Recent)
    itl: Recent = field(default_factory=Recent)
    e2e: Recent = field(default_factory=Recent)

    def tokens(self, now: float, prompt: int, generated: int) -> None:
        if prompt:
            self.prompt.add(now, prompt)
        if generated:
            self.generation.add(now, generated)

    def gaps(self, seconds: Iterable[float]) -> None:
        for value in seconds:
            self.itl.add(value)
