"""Computes rates over the last ten seconds and latencies of recent requests, for Status and `Retry-After`."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.messages import Quantiles

WINDOW_S = 10.0
SAMPLES = 1024  # how many observations quantiles are computed from


@dataclass(slots=True)
class Rate:
    """Measures tokens per second over the last WINDOW_S."""

    _events: deque[tuple[float, int]] = field(default_factory=deque)
    _sum: int = 0

    def add(self, now: float, count: int) -> None:
        self._events.append((now, count))
        self._sum += count
        self._forget(now)

    def per_second(self, now: float) -> float:
        self._forget(now)
        return self._sum / WINDOW_S

    def total(self, now: float) -> int:
        """Returns the number of tokens in the last WINDOW_S."""
        self._forget(now)
        return self._sum

    def _forget(self, now: float) -> None:
        while self._events and self._events[0][0] < now - WINDOW_S:
            self._sum -= self._events.popleft()[1]


@dataclass(slots=True)
class BusyRate:
    """Measures tokens per second of busy time, over the last WINDOW_S of busy time. Idle time does not count."""

    _rate: Rate = field(default_factory=Rate)
    _busy_s: float = 0.0  # total busy time
    _since: float | None = None  # the time up to which busy time is counted; None while idle

    def busy(self, now: float) -> None:
        """Starts busy time, unless it has started already."""
        if self._since is None:
            self._since = now

    def idle(self) -> None:
        """Starts idle time."""
        self._since = None

    def add(self, now: float, count: int) -> None:
        self._busy_s += 0.0 if self._since is None else now - self._since
        self._since = now
        self._rate.add(self._busy_s, count)

    def per_second(self) -> float:
        """Returns the rate, or 0 if nothing has been measured yet."""
        return self._rate.total(self._busy_s) / min(WINDOW_S, self._busy_s) if self._busy_s else 0.0


@dataclass(slots=True)
class Recent:
    """Computes quantiles of the last SAMPLES observations."""

    _values: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def add(self, value: float) -> None:
        self._values.append(value)

    def quantiles(self) -> Quantiles:
        values = sorted(self._values.copy())
        return Quantiles(*(quantile(values, q) for q in (0.50, 0.95, 0.99))) if values else Quantiles()


def quantile(ordered: list[float], q: float) -> float:
    """Returns the nearest-rank quantile of ascending values. Raises IndexError if there are no values."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


@dataclass(slots=True)
class Stats:
    """The statistics of a worker. The compute loop updates them after each step."""

    prompt: Rate = field(default_factory=Rate)
    generation: Rate = field(default_factory=Rate)
    speed: BusyRate = field(default_factory=BusyRate)
    ttft: Recent = field(default_factory=Recent)
    itl: Recent = field(default_factory=Recent)
    e2e: Recent = field(default_factory=Recent)
    steps: int = 0

    def tokens(self, now: float, prompt: int, generated: int) -> None:
        self.steps += 1
        self.speed.add(now, prompt + generated)
        if prompt:
            self.prompt.add(now, prompt)
        if generated:
            self.generation.add(now, generated)

    def gaps(self, seconds: Iterable[float]) -> None:
        for value in seconds:
            self.itl.add(value)
