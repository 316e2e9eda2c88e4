"""Tells the repeats of a signal to stop from a second request.

One request often arrives as several signals: `timeout` and `make` pass a signal on to a process that the terminal or
the process manager has signalled, too. They arrive within milliseconds, which a person at a keyboard is too slow for.
"""

import signal
import time
from collections.abc import Callable

REPEAT_S = 1.0  # signals that arrive this soon after the first belong to it


class StopRequests:
    """The requests of one process to stop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: returns seconds."""
        self._clock = clock
        self._first_at: float | None = None

    def is_second(self) -> bool:
        """Records a signal, and returns whether it asks a second time: later than REPEAT_S after the first."""
        now = self._clock()
        if self._first_at is None:
            self._first_at = now
        return now - self._first_at > REPEAT_S


def ignore_further() -> None:
    """Makes this process ignore signals to stop, for its last moments: they must not change the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
