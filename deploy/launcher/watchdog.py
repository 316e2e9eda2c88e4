"""Judges by its heartbeat whether a process hangs, and by its exit code whether its own work killed it.

Knows how long each counter may stand still; kills no process. Time is the sum of the intervals between checks, and each
interval is capped, so that a machine that was asleep, or a stopped launcher, does not make a process look hung.

    serving          `alive` or `progress` standing still for `stall_s` is a hang
    before serving   no `progress` and no output for `load_s` is a hang
"""

import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shared.processes.heartbeat import Heartbeat, Phase

CHECK_INTERVAL_S = 0.5
CLEAN_EXITS = (0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Timeouts:
    stall_s: float = 30.0
    load_s: float = 600.0


@dataclass(slots=True)
class StallTimer:
    """Measures for how long a counter has not changed."""

    value: int = -1
    seconds: float = 0.0

    def update(self, value: int, elapsed: float) -> float:
        self.seconds = self.seconds + elapsed if value == self.value else 0.0
        self.value = value
        return self.seconds


class Watchdog:
    """Watches the successive processes of one child."""

    def __init__(self, heartbeat: Heartbeat, timeouts: Timeouts, oom_kills: Callable[[], int] | None = None) -> None:
        """`oom_kills`: returns how many processes the system has killed for lack of memory."""
        self.heartbeat = heartbeat
        self._timeouts = timeouts
        self._oom_kills = oom_kills or _system_oom_kills
        self.start()

    @property
    def serving(self) -> bool:
        return self.heartbeat.phase is Phase.SERVING

    def start(self) -> None:
        """Begins to watch a new process."""
        self.heartbeat.start()
        self._alive, self._progress = StallTimer(), StallTimer()
        self._oom_kills_before = self._oom_kills()

    def check(self, elapsed: float, output_bytes: int) -> str:
        """Describes how the process hangs; returns an empty string if it does not.

        elapsed: seconds since the last check.
        output_bytes: the number of bytes that the process has printed so far.
        """
        serving, elapsed = self.serving, min(elapsed, 2 * CHECK_INTERVAL_S)
        silent = self._alive.update(self.heartbeat.alive_count, elapsed)
        stuck = self._progress.update(self.heartbeat.progress_count + (0 if serving else output_bytes), elapsed)
        if not serving:
            return f"no loading progress for {stuck:.0f} s" if stuck > self._timeouts.load_s else ""
        if silent > self._timeouts.stall_s:
            return f"no sign of life for {silent:.0f} s"
        return f"no progress for {stuck:.0f} s" if stuck > self._timeouts.stall_s else ""

    def ended(self, code: int, *, hung: bool) -> None:
        """Tells the next process, through the heartbeat file, whether the ended process died of its own work. A `kill
        -9` from outside does not count as its own work."""
        if self.serving:
            own_work = code != -signal.SIGKILL or hung or self._oom_kills() > self._oom_kills_before
            self.heartbeat.blamed = own_work and code not in CLEAN_EXITS


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process. Always False outside Linux."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _system_oom_kills() -> int:
    """Returns the system's count of processes killed for lack of memory; 0 if the system does not report one."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
