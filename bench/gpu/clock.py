"""How long something takes: by the device's own events where it has them, by the wall clock elsewhere."""

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

WARM_UP = 3
MOST_S = 1.0  # of all samples together


class Clock(Protocol):
    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call: the median of several samples, after a warm-up. What it launches need not have ended."""

    def wait(self) -> None:
        """Until the device has done all it was asked."""


class HostClock:
    """For devices that compute before they return."""

    def wait(self) -> None:
        return None

    def seconds(self, call: Callable[[], object]) -> float:
        def sample(calls: int) -> float:
            begun = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - begun) / calls

        return _median(sample, samples=3, sample_s=1e-4)


class CudaClock:
    """Between two events on the stream, so the host's part counts only where the device has to wait for it."""

    def wait(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object]) -> float:
        def sample(calls: int) -> float:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            for _ in range(calls):
                call()
            last.record()
            last.synchronize()
            return float(first.elapsed_time(last)) / 1e3 / calls

        return _median(sample, samples=15, sample_s=2e-3)


def clock_of(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()


def _median(sample: Callable[[int], float], *, samples: int, sample_s: float) -> float:
    """`sample(calls)` gives seconds a call; it is asked for so many calls as take `sample_s`."""
    rough = min(sample(1) for _ in range(WARM_UP))
    calls = max(1, min(1000, round(sample_s / max(rough, 1e-7))))
    fitting = max(3, min(samples, int(MOST_S / max(rough * calls, 1e-7))))
    return statistics.median(sample(calls) for _ in range(fitting))
