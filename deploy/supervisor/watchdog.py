"""Judges by its heartbeat whether a process hangs, and by its exit code whether it died of its work.

Knows counters that stand still and how long to bear that; kills nobody. Time is that of the looks: a machine that
was asleep, or a supervisor that was stopped, is no evidence against a process.

    serving    it talks (beats) and its work goes on (turns): one of them standing still for `stall_s` is a hang
    before     a load that does not move (turns) and of which nothing is heard for `load_s`
"""

import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shared.heartbeat import Heartbeat, Phase

TICK_S = 0.5
GOOD_ENDS = (0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Timeouts:
    stall_s: float = 30.0
    load_s: float = 600.0


@dataclass(slots=True)
class StallTimer:
    """For how long a number has not changed."""

    seen: int = -1
    seconds: float = 0.0

    def look(self, value: int, elapsed: float) -> float:
        self.seconds = self.seconds + elapsed if value == self.seen else 0.0
        self.seen = value
        return self.seconds


class Watchdog:
    """One role's processes, one after another."""

    def __init__(self, heartbeat: Heartbeat, patience: Timeouts, oom_kills: Callable[[], int] | None = None) -> None:
        self.heartbeat = heartbeat
        self._patience = patience
        self._oom_kills = oom_kills or _oom_kills
        self.begin()

    @property
    def serving(self) -> bool:
        return self.heartbeat.phase is Phase.SERVING

    def begin(self) -> None:
        """A new process."""
        self.heartbeat.start()
        self._beats, self._turns = StallTimer(), StallTimer()
        self._oom = self._oom_kills()

    def look(self, elapsed: float, heard: int) -> str:
        """In what way it hangs; empty: it does not.

        `elapsed` is the time since the last look in seconds, `heard` grows with everything it prints.
        """
        serving, elapsed = self.serving, min(elapsed, 2 * TICK_S)
        silent = self._beats.look(self.heartbeat.alive_count, elapsed)
        stuck = self._turns.look(self.heartbeat.progress_count + (0 if serving else heard), elapsed)
        if not serving:
            return f"its loading has not moved for {stuck:.0f} s" if stuck > self._patience.load_s else ""
        if silent > self._patience.stall_s:
            return f"no sign of life for {silent:.0f} s"
        return f"its work has not moved for {stuck:.0f} s" if stuck > self._patience.stall_s else ""

    def ended(self, code: int, *, hung: bool) -> None:
        """Notes for the next process whether this one died of its own work; a `kill -9` from outside is no guilt."""
        if self.serving:
            own = code != -signal.SIGKILL or hung or self._oom_kills() > self._oom
            self.heartbeat.blamed = own and code not in GOOD_ENDS


def is_stopped(pid: int) -> bool:
    """Whether somebody stopped it with a signal or a debugger (on Linux; elsewhere nobody ever did)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _oom_kills() -> int:
    """How many processes the system has killed for want of memory; 0 where it does not say."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
