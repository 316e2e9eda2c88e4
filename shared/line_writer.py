"""A stream that never blocks its writer: a thread writes the lines; lines beyond the buffer are dropped and counted.

It is for processes that must not stall on a full disk or an unread pipe. It knows bytes and a file descriptor. The
standard library's QueueListener does not fit: it bounds records instead of bytes, makes one system call per line, and
waits without limit when it stops.
"""

import os
import threading
from collections import deque
from contextlib import suppress
from typing import TextIO

BATCH_DELAY_S = 0.05  # how long lines gather before they are written together
MAX_PENDING_BYTES = 4 << 20
MAX_WRITE_BYTES = 4096  # a pipe accepts this much atomically, so lines of several processes or threads stay whole


class NonBlockingWriter:
    """Writes lines to a descriptor that its caller owns and closes."""

    def __init__(self, descriptor: int, limit: int = MAX_PENDING_BYTES) -> None:
        self.dropped = 0  # lines
        self._descriptor = descriptor
        self._limit = limit
        self._lines: deque[bytes] = deque()
        self._pending_bytes = 0
        self._has_lines = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

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
            with suppress(RuntimeError):  # the system cannot start a thread: the next line tries again
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while not self._closed.is_set():
            self._has_lines.wait()
            self._closed.wait(BATCH_DELAY_S)
            self._has_lines.clear()  # before reading the queue: a line put from here on sets it again
            self._write_pending()
        self._write_pending()

    def _write_pending(self) -> None:
        while self._lines:
            batch = [self._lines.popleft()]
            size = len(batch[0])
            while self._lines and size + len(self._lines[0]) <= MAX_WRITE_BYTES:
                batch.append(self._lines.popleft())
                size += len(batch[-1])
            if not self._write(b"".join(batch)):
                self.dropped += len(batch)
            self._pending_bytes -= size

    def _write(self, data: bytes) -> bool:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            return False
        return True


class NonBlockingStream:
    """A text stream over a NonBlockingWriter; `close` writes what is pending and leaves `stream` open."""

    def __init__(self, stream: TextIO) -> None:
        self._writer = NonBlockingWriter(stream.fileno())
        self._is_terminal = stream.isatty()

    def write(self, text: str) -> int:
        self._writer.put(text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return self._is_terminal

    def close(self) -> None:
        self._writer.close()
