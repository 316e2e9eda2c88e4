"""Times a call: with CUDA events on a GPU, with the wall clock on other devices."""

import logging
import math
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

log = logging.getLogger("sluice.bench")

WARM_UP = 3
GRAPH_S, MOST_CALLS = 5e-4, 64  # a graph that is timed holds calls for about GRAPH_S seconds, but at most MOST_CALLS
MOST_S = 1.0  # time limit for all samples of one call together


class Clock(Protocol):
    def seconds(self, call: Callable[[], object]) -> float:
        """Returns the seconds that one call takes: the median of several samples, after a warm-up.

        The work that `call` launches on the device need not have ended when `call` returns.
        """

    def seconds_on_device(self, call: Callable[[], object]) -> float:
        """Like `seconds`, but without the host's time to launch the work. `call` must never wait for the device."""

    def wait(self) -> None:
        """Waits until the device has done all its work."""


class HostClock:
    """The clock for devices on which a call returns only after its computation has ended."""

    def wait(self) -> None:
        return None

    def seconds(self, call: Callable[[], object]) -> float:
        def sample(calls: int) -> float:
            begun = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - begun) / calls

        return _median(sample, samples=3, sample_s=1e-4)

    def seconds_on_device(self, call: Callable[[], object]) -> float:
        return self.seconds(call)


class CudaClock:
    """Measures between two CUDA events on the stream. So host time counts only while the device waits for the host."""

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

    def seconds_on_device(self, call: Callable[[], object]) -> float:
        """Times replays of a CUDA graph with several calls, because a call may take the host longer than the device."""
        from worker.model_runner.cuda_graph_capture import (
            cuda_capture,  # imported here: section `floors` runs without it
        )

        for _ in range(WARM_UP):
            call()  # compiles, which a capture must not do
        self.wait()

        def repeated(calls: int) -> Callable[[], object]:
            def body() -> None:
                for _ in range(calls):
                    call()

            return cuda_capture()(body).replay  # a capture each, because memory of graphs that are gone is not shared

        try:
            calls = max(1, min(MOST_CALLS, math.ceil(GRAPH_S / max(self.seconds(repeated(1)), 1e-7))))
            return self.seconds(repeated(calls)) / calls
        except Exception as error:
            self.wait()  # raises if the device is unusable
            log.warning("timed with the host's launches: not captured: %s: %s", type(error).__name__, error)
            return self.seconds(call)


def clock_of(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()


def _median(sample: Callable[[int], float], *, samples: int, sample_s: float) -> float:
    """Returns the median seconds per call. The number of calls per sample is chosen to take about `sample_s` seconds.
    sample: takes a number of calls, returns the seconds per call."""
    rough = min(sample(1) for _ in range(WARM_UP))
    calls = max(1, min(1000, round(sample_s / max(rough, 1e-7))))
    fitting = max(3, min(samples, int(MOST_S / max(rough * calls, 1e-7))))
    return statistics.median(sample(calls) for _ in range(fitting))
