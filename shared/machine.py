"""What this machine has to give, without importing what uses it."""

import os
from itertools import takewhile
from pathlib import Path

CPU_SHARE = 0.4  # of free memory, for K/V on the CPU; the rest is the system's, the frontends' and the next model's


def available_bytes() -> int:
    """MemAvailable, or what the control group leaves."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return max(0, available)


def usable_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def visible_gpus() -> list[str]:
    """NVIDIA devices as CUDA_VISIBLE_DEVICES names them; those that it leaves, if it is set.

    As CUDA reads it: what follows a word that names no device, such as -1, does not count.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        words = (word.strip() for word in visible.split(","))
        return list(takewhile(lambda word: word and not word.startswith("-"), words))
    return [str(i) for i, _ in enumerate(sorted(Path("/dev").glob("nvidia[0-9]*")))]
