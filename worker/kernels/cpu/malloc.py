"""Tells the C library to keep freed memory while a model is loaded.

Each weight passes through temporaries of its size. By default, glibc returns those to the system when they are freed,
and the system clears every page again for the next: a fifth to a quarter of the time that loading takes.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # mallopt(3)
MOST = (1 << 31) - 1
MAPPINGS = 1 << 16  # glibc's default


@contextmanager
def kept_free_memory() -> Iterator[None]:
    """Keeps freed memory in the process until the end of the block, which returns it. No effect without glibc.

    Afterwards, allocations from 32 MiB on are mappings of their own, and 64 MiB may stay free: the most that glibc
    would come to by itself. (A call of mallopt ends its own adjustment.)
    """
    c = ctypes.CDLL(None)
    if not hasattr(c, "mallopt") or not hasattr(c, "malloc_trim"):
        yield
        return
    c.mallopt(M_MMAP_MAX, 0)
    c.mallopt(M_TRIM_THRESHOLD, MOST)
    try:
        yield
    finally:
        c.mallopt(M_MMAP_MAX, MAPPINGS)
        c.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        c.mallopt(M_TRIM_THRESHOLD, 64 << 20)
        c.malloc_trim(0)
