"""Computes the median of the last few measurements."""

from collections import deque
from statistics import median_low

SAMPLES = 7  # number of measurements that a median is computed from


class Median:
    """The lower median of the last few values; not the upper one, because disturbances only make steps longer."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=SAMPLES)
        self.value = 0.0

    def add(self, value: float) -> None:
        self._values.append(value)
        self.value = median_low(self._values)
