"""Distinguishes a repeated stop signal from a second request to stop.

One request often arrives as several signals, because `timeout` and `make` pass a signal on to a process that the
terminal or the process manager has signalled, too. Repeated signals arrive within milliseconds; a person who presses
Ctrl-C again is slower.
"""

import signal
import time
from collections.abc import Callable

REPEAT_S = 1.0  # a signal within this time after the first belongs to the same request


class StopRequests:
    """The requests to stop that one process has received."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: returns the time in seconds, from any start."""
        self._clock = clock
        self._first_at: float | None = None

    def is_second(self) -> bool:
        """Records a signal. Returns whether it is a second request, more than REPEAT_S after the first signal."""
        now = self._clock()
        if self._first_at is None:
            self._first_at = now
        return now - self._first_at > REPEAT_S


def ignore_further() -> None:
    """Makes this process ignore stop signals during its last moments, so that they cannot change the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
