"""Histograms that are cheap to observe: observations are additions in plain Python until the next flush."""

from bisect import bisect_left
from collections.abc import Sequence

from shared.logs.prometheus_adapter import BulkHistogram


class BufferedHistogram:
    """Holds the observations of one histogram until the next flush."""

    __slots__ = ("_bounds", "_counts", "_histogram", "_total")

    def __init__(self, histogram: BulkHistogram, bounds: Sequence[float]) -> None:
        self._histogram = histogram
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def flush(self) -> None:
        if any(self._counts):
            self._histogram.add(self._counts, self._total)
            self._counts = [0] * len(self._counts)
            self._total = 0.0
