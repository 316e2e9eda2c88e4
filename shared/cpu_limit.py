"""Ends Python code of the main thread that computes for too long.

The limit is on the thread's processor time, so a busy or suspended machine ends nothing. It is noticed between two
operations of Python: one long operation (a product of large numbers) is not interrupted.
"""

import atexit
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

LEAST_S = 1e-3  # between two looks at the thread's time


class CpuLimit:
    """A context manager in which an error is raised after one to two times so many seconds. Only in the main thread.

    It can be entered again and again, but not while it is entered. It is the only user of SIGALRM in its process.
    Entering it takes no call of the system, but once in `seconds`: the alarm stays set, and most alarms find nothing.
    """

    def __init__(self, seconds: float, error: Callable[[], Exception]) -> None:
        self._seconds, self._error = seconds, error
        self._main = threading.main_thread().ident
        self._inside = self._is_set = self._listens = False
        self._entered = 0  # how often
        self._seen = (0, 0.0)  # `_entered`, and the thread's time, when an alarm first found this block

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            self._entered += 1
            self._inside = True
            if not self._is_set:
                if not self._listens:
                    signal.signal(signal.SIGALRM, self._look)
                    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0.0)  # Python takes its handlers away first
                self._listens = self._is_set = True
                signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.get_ident() == self._main:
            self._inside = False

    def _look(self, number: int, frame: FrameType | None) -> None:
        self._is_set = False
        if not self._inside:
            return
        now = time.thread_time()
        if self._seen[0] != self._entered:
            self._seen = self._entered, now
        left = self._seen[1] + self._seconds - now
        if left <= 0:
            raise self._error()
        self._is_set = True
        signal.setitimer(signal.ITIMER_REAL, max(LEAST_S, left))
