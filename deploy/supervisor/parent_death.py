"""Ties a child to the process that started it: when the parent is gone, however it went, the child is killed.

The child does this itself as its first act, so nothing has to run between fork and exec.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def tie_to(parent: int) -> None:
    """Die with process `parent`. Where the system has no such thing (not Linux), only checks that it still lives."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)
