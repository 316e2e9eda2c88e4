"""Faults of what a server stands on: full disks, clocks that jump, folders that cannot be written."""

import os
import random
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.faults.fault import Fault, Healed, at_once
from tests.faults.site import Plan, Site

# Wall-clock time jumps by a day, to and fro, every second; monotonic time is left alone.
_CLOCK = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *out) {
    int result = syscall(SYS_clock_gettime, id, out);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) {
        struct timespec now;
        syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
        out->tv_sec += (now.tv_sec % 3 - 1) * 86400;
    }
    return result;
}
int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


def jumping_clock(home: Path) -> dict[str, str]:
    """Environment of a process that lives in such a time."""
    source, library = home / "clock.c", home / "clock.so"
    source.write_text(_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    return {"LD_PRELOAD": str(library)}


def own_disk(home: Path) -> dict[str, str]:
    """A small file system for the run folder. Needs root."""
    run = home / "run"
    run.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs", str(run)], check=True)
    return {}


async def _fill(site: Site, dice: random.Random) -> Healed:
    """The disk of the run folder; then processes that must start again on it."""
    ballast = site.folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    worker, frontend = await site.worker(), min(await site.frontends())
    for pid in (worker, frontend):
        os.kill(pid, signal.SIGKILL)
    await site.until(lambda stats: stats["worker"]["pid"] != worker)
    await site.until(lambda stats: len({peer["pid"] for peer in stats["frontends"]} - {frontend}) == 2)
    await site.until_ready()
    ballast.unlink()
    return at_once


async def _a_while(site: Site, dice: random.Random) -> Healed:
    return at_once


FAULTS = {
    "full-log": Fault("the log's disk is full", _a_while, Plan(log="/dev/full")),
    "full-run-dir": Fault("the run folder's disk is full, and kill -9", _fill, Plan(prepare=own_disk), cuts=True),
    "clock": Fault("the clock jumps by a day, every second", _a_while, Plan(prepare=jumping_clock)),
}
