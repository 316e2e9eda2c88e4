"""When glibc gives freed memory back to the system. Other C libraries are left as they are."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # of mallopt(3)
LARGE_BYTES = 256 << 10
MOST = (1 << 31) - 1
MAPPINGS = 1 << 16  # glibc's default


def _set(values: dict[int, int]) -> bool:
    """Sets parameters of mallopt. Returns False where it does not exist."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    for parameter, value in values.items():
        mallopt(parameter, value)
    return True


def map_large_buffers() -> None:
    """Has buffers of LARGE_BYTES or more, such as large request bodies, return to the system as soon as they are freed.

    By default, glibc moves this limit up to 32 MiB as it sees larger buffers; an hour of fuzzed requests then
    left 58 MiB of freed memory in the arenas of a frontend.
    """
    _set({MMAP_THRESHOLD: LARGE_BYTES})


@contextmanager
def kept_free_memory() -> Iterator[None]:
    """Keeps freed memory in the process until the end of the block, which returns it to the system.

    While a model is loaded, each weight passes through temporaries of its size. By default, the system takes them back
    and clears their pages again for the next weight, which takes a fifth to a quarter of the time.

    Afterwards, buffers of 32 MiB or more are mappings of their own, and 64 MiB may stay free: the most that glibc would
    come to by itself. (A call of mallopt ends its own adjustment.)
    """
    works = _set({MMAP_MAX: 0, TRIM_THRESHOLD: MOST})
    try:
        yield
    finally:
        if works:
            _set({MMAP_MAX: MAPPINGS, MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20})
            ctypes.CDLL(None).malloc_trim(0)
