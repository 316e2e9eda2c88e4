"""A stream that never blocks its writer: a thread writes the lines; lines beyond the buffer are dropped and counted.

It is for processes that must not stall on a full disk or an unread pipe. It knows only bytes and a file descriptor. The
standard library's QueueListener bounds records instead of bytes, makes one system call per line, and waits without
limit when it stops.
"""

import io
import json
import logging
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Self, TextIO

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


# The log lines of a process: readable ones, or with `--log-format json` one JSON object each.
#
# Knows logging and standard error, but no processes or requests. With JSON, everything that Python code writes to
# standard error becomes a log line, too: warnings, tracebacks and prints of libraries.

LOG_START = '{"level":"'  # every log line in JSON begins like this, and no line of the access log does
log = logging.getLogger("sluice")


def is_json_wanted(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a command line asks for JSON. It may contain mistakes: errors about them must be in JSON, too."""
    pairs = zip(words, [*words[1:], ""], strict=False)
    given = [word.partition("=")[2] or after for word, after in pairs if word.partition("=")[0] == "--log-format"]
    return (given[-1] if given else environment.get("SLUICE_LOG_FORMAT", "")) == "json"


def set_up(level: str, *, as_json: bool) -> None:
    """Logs to standard error from now on. Call it once, before any other thread runs.

    level: the minimum severity, a value of `--log-level`
    """
    if not as_json:
        lines = "%(asctime)s %(levelname)-7s %(message)s"
        logging.basicConfig(level=level.upper(), format=lines, datefmt="%H:%M:%S")
        return
    stream = sys.stderr.stream if isinstance(sys.stderr, _Prints) else sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.stderr = _Prints(stream)
    sys.excepthook = _log_exception
    threading.excepthook = lambda args: _log_exception(args.exc_type, args.exc_value, args.exc_traceback)
    sys.unraisablehook = lambda args: _log_exception(args.exc_type, args.exc_value, args.exc_traceback)


def is_json_set_up() -> bool:
    """Whether this process logs JSON."""
    return isinstance(sys.stderr, _Prints)


def json_line(level: str, message: str, **fields: Any) -> str:
    """Returns a log line without its line end. fields: further keys; a key whose value is None is left out."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    content = {"level": level, "time": now, "message": message}
    more = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(content | more, ensure_ascii=False, separators=(",", ":"))


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        trace = self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else None
        level, message = record.levelname.lower(), record.getMessage().rstrip("\n")
        return json_line(level, message, logger=record.name, exception=trace, stack=record.stack_info)


class _Prints(io.TextIOBase):
    """Replaces standard error: turns each line that is written, such as a library's print, into a log line."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                log.info("%s", line)
        return len(text)

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return False


def _log_exception(kind: type[BaseException], error: BaseException | None, at: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    message = "".join(traceback.format_exception_only(kind, error)).strip()
    log.critical("%s", message, exc_info=(kind, error or kind(), at))


MAX_SHOWN = 100  # how many characters of a name in a file an error message repeats


def on_one_line(text: str, most: int = MAX_SHOWN) -> str:
    """Returns the beginning of a text from a file for a message; a line break or another control is an escape."""
    shown = text if len(text) <= most else f"{text[:most]}…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown)
