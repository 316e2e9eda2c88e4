"""Touches K/V memory before it is needed: the system's first hand-over of a page costs more than computing into it.

Fresh pages are handed out in ascending order, so what is needed next is known. A thread of lowest priority stays some
tokens ahead of the highest page in use.
"""

import os
import threading
from collections.abc import Callable, Sequence

AHEAD_TOKENS = 16_384
STRIDE_TOKENS = 256  # touched at a time
NICE = 19

Touch = Callable[[int, int], bool]  # an address, bytes; False: cannot


class Populator:
    """`reach(page)` says that pages up to this one are in use. Ends with the process."""

    def __init__(self, touch: Touch, bases: Sequence[int], pages: int, page_bytes: int, page_size: int) -> None:
        """`bases`: addresses of arrays of `pages` pages of `page_bytes` each (one a layer, for K and for V)."""
        self._touch = touch
        self._bases = tuple(bases)
        self._pages, self._page_bytes = pages, page_bytes
        self._stride = max(1, STRIDE_TOKENS // page_size)
        self._ahead = max(1, AHEAD_TOKENS // page_size)
        self._done = 0  # pages below are populated
        self._highest = 0
        self._news = threading.Event()
        threading.Thread(target=self._run, name="populate", daemon=True).start()

    @property
    def populated(self) -> int:
        """How many pages, from the first on."""
        return self._done

    def reach(self, page: int) -> None:
        """Costs nothing unless the page is the highest yet."""
        if page > self._highest:
            self._highest = page
            self._news.set()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while self._done < self._pages:
            if self._done < self._highest + self._ahead:
                if not self._populate(self._done, min(self._done + self._stride, self._pages)):
                    return
            else:
                self._news.wait()
                self._news.clear()

    def _populate(self, first: int, end: int) -> bool:
        length = (end - first) * self._page_bytes
        self._done = end
        return all([self._touch(base + first * self._page_bytes, length) for base in self._bases])
