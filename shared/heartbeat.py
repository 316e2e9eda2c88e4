"""A process's heartbeat: a small file that the process and its watchdog both map.

The watchdog can read the file even if the process is stopped, stuck or dead, and no message is sent. The file holds
counters instead of times, because the watchdog measures by its own clock how long a counter stands still. The process
writes the body.

      0  alive     u64  grows while the process can respond, whatever it computes
      8  progress  u64  grows while its work advances: each iteration of a loop, each layer of a step, each file loaded
     16  phase     u64  see Phase
     24  blamed    u64  written by the watchdog: 1 if the previous process crashed or hung because of its own work
     32  body
"""

import mmap
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

HEADER_BYTES = 32
FILE_BYTES = 1 << 16


class Phase(IntEnum):
    STARTING = 0  # the process has not reported yet
    LOADING = 1
    SERVING = 2


class Heartbeat:
    """The counters of one process.

    If there is no file, writes go to an anonymous mapping, so callers need no special case.
    """

    def __init__(self, file: Path | None = None) -> None:
        """Creates the file, readable by this user only, unless it exists. Raises OSError."""
        self.file = file
        self._use(_map_file(file) if file else mmap.mmap(-1, FILE_BYTES))

    def _use(self, mapping: mmap.mmap) -> None:
        self._map = mapping
        self._words = memoryview(self._map)[:HEADER_BYTES].cast("Q")
        self.body = memoryview(self._map)[HEADER_BYTES:]

    def alive(self) -> None:
        self._words[0] += 1

    def progress(self) -> None:
        self._words[1] += 1

    @property
    def alive_count(self) -> int:
        return self._words[0]

    @property
    def progress_count(self) -> int:
        return self._words[1]

    @property
    def phase(self) -> Phase:
        return Phase(self._words[2])

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._words[2] = phase

    @property
    def blamed(self) -> bool:
        return bool(self._words[3])

    @blamed.setter
    def blamed(self, blamed: bool) -> None:
        self._words[3] = blamed

    def start(self) -> None:
        """Resets the phase to STARTING for a new process, which continues the file of the previous process.

        The counters are not reset, and the body of the previous process stays readable. If the file was deleted, it is
        recreated with its contents where possible, because programs that clean up temporary files do not see that a
        file is mapped.
        """
        if self.file is not None and not self.file.exists():
            with suppress(OSError):
                self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                mapping = _map_file(self.file)
                mapping[:] = self._map[:]
                self._use(mapping)
        self.phase = Phase.STARTING


def _map_file(file: Path) -> mmap.mmap:
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size < FILE_BYTES:
            # Writing to a mapped page for which the disk has no space would kill the process.
            os.posix_fallocate(fd, 0, FILE_BYTES)
        return mmap.mmap(fd, FILE_BYTES)
    finally:
        os.close(fd)


# Distinguishes a repeated stop signal from a second request to stop.
#
# One request often arrives as several signals, because `timeout` and `make` pass a signal on to a process that the
# terminal or the process manager has signalled, too. Repeated signals arrive within milliseconds; a person who
# presses Ctrl-C again is slower.

REPEAT_S = 1.0  # a signal within this time after the first belongs to the same request


class StopRequests:
    """The requests to stop that one process has received."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: returns the time in seconds, from any start."""
        self._clock = clock
        self._first_at: float | None = None

    def is_second(self) -> bool:
        """Records a signal. Returns whether it is a second request, more than REPEAT_S after the first signal."""
        now = self._clock()
        if self._first_at is None:
            self._first_at = now
        return now - self._first_at > REPEAT_S


def ignore_further() -> None:
    """Makes this process ignore stop signals during its last moments, so that they cannot change the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
