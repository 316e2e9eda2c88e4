"""A process's sign of life: a small file that the process and whoever looks after it both map.

It can be read whatever has become of the process, stopped, stuck or dead, and costs no message. Counters, not
clocks: who reads sees by a watch of its own that one stands still. What follows the head is the owner's to write.

      0  beats   u64  grows while the process can talk, whatever it computes
      8  turns   u64  grows while its work goes on: each turn of a loop, each layer of a step, each file loaded
     16  phase   u64  see Phase
     24  blamed  u64  written by who looks after it: 1 if the last process died of what it was doing
     32  body
"""

import mmap
import os
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

HEAD = 32
SIZE = 1 << 16


class Phase(IntEnum):
    STARTING = 0  # it has said nothing yet
    LOADING = 1
    SERVING = 2


class Heartbeat:
    """Without a file it is written in vain, which costs the same and needs no questions."""

    def __init__(self, file: Path | None = None) -> None:
        """Makes the file, for this user's eyes only, unless it is there. Raises OSError."""
        self.file = file
        self._open(_shared(file) if file else mmap.mmap(-1, SIZE))

    def _open(self, shared: mmap.mmap) -> None:
        self._map = shared
        self._words = memoryview(self._map)[:HEAD].cast("Q")
        self.body = memoryview(self._map)[HEAD:]

    def beat(self) -> None:
        self._words[0] += 1

    def turn(self) -> None:
        self._words[1] += 1

    @property
    def beats(self) -> int:
        return self._words[0]

    @property
    def turns(self) -> int:
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

    def begin(self) -> None:
        """For a new process. The counters go on, and what the last one left can still be read.

        A file that somebody took away is there again with all that was in it, if it can be: who tidies up temporary
        files knows nothing of those who only map them.
        """
        if self.file is not None and not self.file.exists():
            with suppress(OSError):
                self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                shared = _shared(self.file)
                shared[:] = self._map[:]
                self._open(shared)
        self.phase = Phase.STARTING


def _shared(file: Path) -> mmap.mmap:
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size < SIZE:
            os.posix_fallocate(fd, 0, SIZE)  # a page that finds no room when it is written kills the process
        return mmap.mmap(fd, SIZE)
    finally:
        os.close(fd)
