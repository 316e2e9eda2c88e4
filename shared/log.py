"""A stream that never blocks its writer: a thread writes the lines; lines beyond the buffer are dropped and counted.

It is for processes that must not stall on a full disk or an unread pipe. It knows only bytes and a file descriptor. The
standard library's QueueListener bounds records instead of bytes, makes one system call per line, and waits without
limit when it stops.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Self, TextIO

BATCH_DELAY_S = 0.05  # how long lines gather before they are written together
MAX_PENDING_BYTES = 4 << 20
MAX_WRITE_BYTES = 4096  # a pipe accepts this much atomically, so lines of several processes or threads stay whole


def write_all(descriptor: int, data: bytes) -> int:
    """Writes data to a descriptor. Returns the number of bytes written, fewer than given after an error."""
    written = 0
    with suppress(OSError):
        while written < len(data):
            written += os.write(descriptor, data[written:])
    return written


class NonBlockingWriter:
    """Passes lines to a function, in a thread of its own."""

    def __init__(self, write: Callable[[bytes], int], limit: int = MAX_PENDING_BYTES) -> None:
        """
        write: gets whole lines, and returns how many bytes of them it has written
        limit: the most bytes that may wait to be written
        """
        self.dropped = 0  # number of dropped lines
        self._write = write
        self._torn = False  # whether only a part of the last line was written
        self._limit = limit
        self._lines: deque[bytes] = deque()
        self._pending_bytes = 0
        self._has_lines = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def to(cls, descriptor: int, limit: int = MAX_PENDING_BYTES) -> Self:
        """Returns a writer to a descriptor; the caller owns and closes the descriptor."""
        return cls(partial(write_all, descriptor), limit)

    def put(self, line: bytes) -> None:
        """Queues a line, which includes its line end. Never blocks. Call it from one thread only."""
        if self._pending_bytes + len(line) > self._limit:
            self.dropped += 1
            return
        self._pending_bytes += len(line)
        self._lines.append(line)
        if self._thread is None or not self._has_lines.is_set():
            self._wake()

    def close(self, timeout: float = 1.0) -> None:
        """Writes the pending lines, for at most `timeout` seconds."""
        self._closed.set()
        self._has_lines.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _wake(self) -> None:
        self._has_lines.set()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="line-writer", daemon=True)
            with suppress(RuntimeError):  # no thread can be started now; the next line tries again
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while not self._closed.is_set():
            self._has_lines.wait()
            self._closed.wait(BATCH_DELAY_S)
            self._has_lines.clear()  # cleared before the queue is read, so a line put later sets the event again
            self._write_pending()
        self._write_pending()

    def _write_pending(self) -> None:
        while self._lines:
            batch = [self._lines.popleft()]
            size = len(batch[0])
            while self._lines and size + len(self._lines[0]) <= MAX_WRITE_BYTES:
                batch.append(self._lines.popleft())
                size += len(batch[-1])
            self._give(b"".join(batch), len(batch))
            self._pending_bytes -= size

    def _give(self, data: bytes, count: int) -> None:
        """Writes lines. After a line that was written in part, the next line begins on a new line."""
        data = b"\n" + data if self._torn else data
        written = self._write(data)
        if written < len(data):
            self.dropped += count
        if written:
            self._torn = data[written - 1 : written] != b"\n"


class NonBlockingStream:
    """A text stream over a NonBlockingWriter; `close` writes the pending lines and leaves `stream` open."""

    def __init__(self, stream: TextIO) -> None:
        self._writer = NonBlockingWriter.to(stream.fileno())
        self._is_terminal = stream.isatty()

    def write(self, text: str) -> int:
        self._writer.put(text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return self._is_terminal

    def close(self) -> None:
        self._writer.close()
