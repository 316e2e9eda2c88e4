"""Prefaults K/V memory: makes the system provide it before its first use, because page faults would slow down steps.

The pool hands out fresh pages in ascending order, so the next pages are known. A thread of the lowest priority
prefaults memory up to AHEAD_TOKENS ahead of the highest page in use.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

AHEAD_TOKENS = 16_384
STRIDE_TOKENS = 256  # how many tokens one call of touch_next() covers
NICE = 19

Touch = Callable[[int, int], bool]  # called with (address, bytes); returns False if this system cannot prefault


class Prefaulter:
    """Touches pages ahead of the highest page passed to reach(). Its thread ends when the object is deleted."""

    def __init__(self, touch: Touch, arrays: Sequence[Tensor]) -> None:
        """arrays: K and V of every layer, each contiguous and of shape [pages, page_size, …]."""
        self._touch = touch
        self._arrays = tuple(arrays)  # keeps the tensors alive while the thread touches their memory
        # The thread gets numbers, not tensors: the process would abort if the thread ran PyTorch's code at exit.
        self._regions = [(part.data_ptr(), part[0].nbytes) for part in arrays]
        self._pages, page_size = arrays[0].shape[:2]
        self._stride = max(1, STRIDE_TOKENS // page_size)
        self._ahead = max(1, AHEAD_TOKENS // page_size)
        self._done = 0  # all pages below this one are prefaulted
        self._highest = 0
        self._wake = threading.Event()
        weakref.finalize(self, self._wake.set)
        threading.Thread(target=_run, args=(weakref.ref(self), self._wake), name="prefault", daemon=True).start()

    @property
    def prefaulted(self) -> int:
        """The number of prefaulted pages, counted from page 0."""
        return self._done

    def reach(self, page: int) -> None:
        """Notes that pages up to `page` are in use. Costs almost nothing if a higher page was noted before."""
        if page > self._highest:
            self._highest = page
            self._wake.set()

    def touch_next(self) -> bool:
        """Touches the next STRIDE_TOKENS. Returns False if nothing is left to do until reach() is called."""
        first, end = self._done, min(self._done + self._stride, self._pages)
        if first == end or first >= self._highest + self._ahead:
            return False
        touched = all([self._touch(start + first * size, (end - first) * size) for start, size in self._regions])
        self._done = end if touched else self._pages
        return True


def _run(prefaulter: "weakref.ref[Prefaulter]", wake: threading.Event) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    while (alive := prefaulter()) is not None:
        if not alive.touch_next():
            del alive
            wake.wait()
            wake.clear()
