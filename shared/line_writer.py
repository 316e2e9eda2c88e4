"""A stream that never makes its writer wait: lines go out in a thread of their own, or are dropped and counted.

For what must not stand still because a disk is full, or because nobody reads the pipe. Knows bytes and a descriptor.
"""

import os
import threading
from collections import deque
from contextlib import suppress
from typing import TextIO

WAIT_S = 0.05  # how long lines gather before they go out together
LIMIT = 4 << 20  # bytes that may wait
PIECE = 4096  # a pipe takes so much at once: lines of several processes, or threads, stay whole


class NonBlockingWriter:
    """Lines for one descriptor, which stays its owner's."""

    def __init__(self, descriptor: int, limit: int = LIMIT) -> None:
        self.dropped = 0  # lines
        self._descriptor = descriptor
        self._limit = limit
        self._lines: deque[bytes] = deque()
        self._waiting = 0  # bytes
        self._news = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, line: bytes) -> None:
        """Takes a line with its end; never blocks. To be called from one thread."""
        if self._waiting + len(line) > self._limit:
            self.dropped += 1
            return
        self._waiting += len(line)
        self._lines.append(line)
        if self._thread is None or not self._news.is_set():
            self._begin()

    def close(self, timeout: float = 1.0) -> None:
        """Writes what waits, for `timeout` seconds at most."""
        self._closed.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _begin(self) -> None:
        self._news.set()
        if self._thread is None:  # at the first line
            thread = threading.Thread(target=self._run, name="writer", daemon=True)
            with suppress(RuntimeError):  # the system has no room for one: the next line asks again
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while not self._closed.is_set():
            self._news.wait()
            self._closed.wait(WAIT_S)
            self._news.clear()  # before looking: what comes from here on rings again
            self._write_all()
        self._write_all()

    def _write_all(self) -> None:
        while self._lines:
            piece = [self._lines.popleft()]
            size = len(piece[0])
            while self._lines and size + len(self._lines[0]) <= PIECE:
                piece.append(self._lines.popleft())
                size += len(piece[-1])
            if not self._write(b"".join(piece)):
                self.dropped += len(piece)
            self._waiting -= size

    def _write(self, data: bytes) -> bool:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            return False
        return True


class NonBlockingStream:
    """A text stream over an writer; `close` lets out what waits and leaves the stream beneath open."""

    def __init__(self, stream: TextIO) -> None:
        self.writer = NonBlockingWriter(stream.fileno())
        self._terminal = stream.isatty()

    def write(self, text: str) -> int:
        self.writer.put(text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return self._terminal

    def close(self) -> None:
        self.writer.close()
