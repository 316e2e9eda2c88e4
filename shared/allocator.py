"""How glibc gives memory back; other C libraries are left as they are."""

import ctypes

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
LARGE_BYTES = 256 << 10


def map_large_buffers() -> None:
    """Has buffers of LARGE_BYTES or more, such as large request bodies, return to the system as soon as they are freed.

    By default, glibc moves this limit up to 32 MiB as it sees larger buffers; an hour of fuzzed requests then
    left 58 MiB of freed memory in the arenas of a frontend.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
