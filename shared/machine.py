"""Free memory, CPU cores and GPUs of this machine, without importing any library that uses them."""

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

CPU_SHARE = 0.4  # share of free memory that K/V gets on the CPU; the system, frontends and the next model get the rest


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of this machine in bytes, or the limit of this process's control group if the limit is lower.

    available: free memory, and what the system frees on demand, above all its cache of files. swap: free swap space.
    """

    total: int
    available: int
    swap: int


def memory(root: Path = Path("/")) -> Memory:
    """Returns the memory that this process may use now. root: the folder that holds proc and sys."""
    lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    total, available, swap = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable", "SwapFree"))
    for limit, used in _control_groups(root):
        total, available = min(total, limit), min(available, limit - used)
    return Memory(total, max(0, available), swap)


def _control_groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, bytes that cannot be reclaimed) of every control group of this process that has a memory limit."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in VERSIONS:
            files = VERSIONS[controllers]
            base = root / files.folder
            group = base / path.lstrip("/")
            # parents, too: a container sees its own group at the top, whatever the path says
            for folder in (group, *group.parents):
                yield from files.read(folder)
                if folder == base:
                    break


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """The files of one version of control groups. prefix: marks the entries in memory.stat that include subgroups."""

    folder: str
    limit: str
    used: str
    prefix: str

    def read(self, folder: Path) -> Iterator[tuple[int, int]]:
        try:
            limit = int((folder / self.limit).read_text())
            used = int((folder / self.used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # there is no such group, or it holds "max", which means no limit
            return
        cached = sum(int(stat.get(f"{self.prefix}{name}_file", 0)) for name in ("active", "inactive"))
        yield limit, used - cached


VERSIONS = {
    "": _GroupFiles("sys/fs/cgroup", "memory.max", "memory.current", ""),
    "memory": _GroupFiles("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


def available_bytes() -> int:
    """Returns the available memory, without swap."""
    return memory().available


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def lower_own_priority(niceness: int) -> None:
    """Lowers the priority of the calling thread alone, by so many of Linux's steps. Other systems have no such call."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + niceness))


def visible_gpus() -> list[str]:
    """Returns the names of NVIDIA devices; if CUDA_VISIBLE_DEVICES is set, only the devices that it lists.

    A word that names no device, such as -1, ends the list, because CUDA reads the variable in this way.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        words = (word.strip() for word in visible.split(","))
        return list(takewhile(lambda word: word and not word.startswith("-"), words))
    return [str(i) for i, _ in enumerate(sorted(Path("/dev").glob("nvidia[0-9]*")))]


# Controls when glibc returns freed memory to the system. Changes nothing with other C libraries.

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


def return_memory() -> None:
    """Makes glibc return freed memory to the operating system; does nothing with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
