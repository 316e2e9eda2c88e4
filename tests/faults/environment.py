"""Faults of a server's environment: full disks, clocks that jump."""

import os
import random
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.faults.fault import Fault, Recovered, at_once
from tests.faults.server import ServerPlan, ServerUnderTest

# The wall clock jumps by a day, back and forth, every second; the monotonic clock is unchanged.
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
    """Returns environment variables that give a process a jumping wall clock."""
    source, library = home / "clock.c", home / "clock.so"
    source.write_text(_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    return {"LD_PRELOAD": str(library)}


def own_disk(home: Path) -> dict[str, str]:
    """Mounts a small file system for the run folder. Needs root."""
    run = home / "run"
    run.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs", str(run)], check=True)
    return {}


async def _fill(server: ServerUnderTest, rng: random.Random) -> Recovered:
    """Fills the disk of the run folder, then kills processes, which have to start again on the full disk."""
    filler = server.folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    worker, frontend = await server.worker(), min(await server.frontends())
    for pid in (worker, frontend):
        os.kill(pid, signal.SIGKILL)
    await server.until(lambda stats: stats["worker"]["pid"] != worker)
    await server.until(lambda stats: len({peer["pid"] for peer in stats["frontends"]} - {frontend}) == 2)
    await server.until_ready()
    filler.unlink()
    return at_once


async def _no_action(server: ServerUnderTest, rng: random.Random) -> Recovered:
    return at_once


FAULTS = {
    "full-log": Fault("the log's disk is full", _no_action, ServerPlan(log="/dev/full")),
    "full-run-dir": Fault(
        "the run folder's disk is full, and kill -9", _fill, ServerPlan(prepare=own_disk), may_cut=True
    ),
    "clock": Fault("the clock jumps by a day, every second", _no_action, ServerPlan(prepare=jumping_clock)),
}
