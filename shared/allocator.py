"""Controls when glibc returns freed memory to the system. Changes nothing with other C libraries."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # parameters of mallopt(3)
LARGE_BYTES = 256 << 10
MOST = (1 << 31) - 1
MAPPINGS = 1 << 16  # glibc's default for MMAP_MAX


def _set(values: dict[int, int]) -> bool:
    """Sets parameters of mallopt. Returns False where the C library has no mallopt."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    for parameter, value in values.items():
        mallopt(parameter, value)
    return True


def map_large_buffers() -> None:
    """Makes glibc return buffers of LARGE_BYTES or more, such as request bodies, to the system when they are freed.

    By default, glibc raises this threshold up to 32 MiB as it sees larger buffers. An hour of fuzzed requests then
    left 58 MiB of freed memory in the arenas of a frontend.
    """
    _set({MMAP_THRESHOLD: LARGE_BYTES})


@contextmanager
def kept_free_memory() -> Iterator[None]:
    """Keeps freed memory in the process until the end of the block, which returns it to the system.

    While a model is loaded, each weight passes through temporary buffers of its size. By default, the system takes the
    buffers back and clears their pages again for the next weight, which costs 20 to 25 % of the loading time.

    After the block, buffers of 32 MiB or more get mappings of their own, and 64 MiB may stay free. mallopt switches off
    glibc's automatic adjustment of both limits, which would not choose higher ones.
    """
    works = _set({MMAP_MAX: 0, TRIM_THRESHOLD: MOST})
    try:
        yield
    finally:
        if works:
            _set({MMAP_MAX: MAPPINGS, MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20})
            ctypes.CDLL(None).malloc_trim(0)
