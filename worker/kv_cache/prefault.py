"""Has the system provide K/V memory before it is needed: the page faults of first writes cost more than computing does.

The pool hands out fresh pages in ascending order, so what is needed next is known. A thread of lowest priority stays
AHEAD_TOKENS ahead of the highest page in use.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

AHEAD_TOKENS = 16_384
STRIDE_TOKENS = 256  # touched at a time
NICE = 19

Touch = Callable[[int, int], bool]  # of an address and a number of bytes; False: it cannot be done here


class Prefaulter:
    """`reach(page)` says that pages up to this one are in use. Its thread ends when nobody holds it any more."""

    def __init__(self, touch: Touch, arrays: Sequence[Tensor]) -> None:
        """`arrays`: of pages, [pages, page_size, …] each (K's and V's of every layer), contiguous."""
        self._touch = touch
        self._arrays = tuple(arrays)  # while the thread touches them they must not go
        # Only numbers in the thread: PyTorch's own code would end the process, should the interpreter end meanwhile.
        self._places = [(part.data_ptr(), part[0].nbytes) for part in arrays]
        self._pages, page_size = arrays[0].shape[:2]
        self._stride = max(1, STRIDE_TOKENS // page_size)
        self._ahead = max(1, AHEAD_TOKENS // page_size)
        self._done = 0  # pages below are populated
        self._highest = 0
        self._news = threading.Event()
        weakref.finalize(self, self._news.set)
        threading.Thread(target=_run, args=(weakref.ref(self), self._news), name="populate", daemon=True).start()

    @property
    def populated(self) -> int:
        """How many pages, from the first on."""
        return self._done

    def reach(self, page: int) -> None:
        """Costs nothing unless the page is the highest yet."""
        if page > self._highest:
            self._highest = page
            self._news.set()

    def advance(self) -> bool:
        """Touches a little more; False when that is far enough for now."""
        first, end = self._done, min(self._done + self._stride, self._pages)
        if first == end or first >= self._highest + self._ahead:
            return False
        able = all([self._touch(start + first * size, (end - first) * size) for start, size in self._places])
        self._done = end if able else self._pages
        return True


def _run(populator: "weakref.ref[Prefaulter]", news: threading.Event) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    while (alive := populator()) is not None:
        if not alive.advance():
            del alive
            news.wait()
            news.clear()
