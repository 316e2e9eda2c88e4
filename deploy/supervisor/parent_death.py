"""Kills a child process when its parent dies, whatever the cause.

The child arranges this itself in its first action, so that no code has to run between fork and exec.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # from prctl(2)


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when `parent` dies. Outside Linux it only checks that `parent` still lives."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)
