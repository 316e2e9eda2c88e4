"""Kills a child process when its parent dies, however it dies.

The child arranges this itself as its first action, so nothing has to run between fork and exec.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with(parent: int) -> None:
    """Has this process killed when `parent` dies. Outside Linux it only checks that `parent` is alive now."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)
