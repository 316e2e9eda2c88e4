"""What the person at the terminal sees: every process's lines under its name, and a progress bar while loading.

Knows nothing of processes; a reader that went away (a closed pipe) is no reason to stop serving.
"""

import contextlib
import re
import sys
from typing import Protocol

_COLOURS = ("36", "35", "33", "34", "32", "31")
_BAR = 30  # columns
_CLEAR = "\r\x1b[K"


class Sink(Protocol):
    """The part of a text stream that a console needs."""

    def write(self, text: str, /) -> int: ...
    def flush(self) -> None: ...
    def isatty(self) -> bool: ...


class LineSplitter:
    """Bytes in, whole lines out, however they were cut; of a line drawn over with \\r only the last state counts."""

    def __init__(self, limit: int = 1 << 16) -> None:
        self._rest = b""
        self._limit = limit

    def feed(self, data: bytes) -> list[str]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._limit:
            whole.append(self._rest)
            self._rest = b""
        return [_text(line) for line in whole]

    def close(self) -> list[str]:
        """The last line, if it did not end."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


class Console:
    """Writes whole lines; on a terminal with colours and a bar that stays below them."""

    def __init__(self, stream: Sink, names: tuple[str, ...] = (), data: Sink | None = None) -> None:
        """`data`: where lines of JSON go, which are for machines; None: stdout."""
        self._stream = stream
        self._data = data
        self._terminal = stream.isatty()
        self._width = max((len(name) for name in names), default=0)
        self._colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
        self._bar = ""  # drawn now, on a terminal
        self._told = ""  # last progress line, elsewhere

    def line(self, name: str, text: str) -> None:
        """One line of the process `name`; an object of JSON stays as it is."""
        if text.startswith('{"') and text.endswith("}"):
            return self._put(self._data or sys.stdout, text + "\n")
        label = f"{name:<{self._width}} |"
        if self._terminal and name in self._colours:
            label = f"\x1b[{self._colours[name]}m{label}\x1b[0m"
        self.say(f"{label} {text}")

    def say(self, text: str) -> None:
        self._write(f"{_CLEAR}{text}\n{self._bar}" if self._bar else f"{text}\n")

    def progress(self, share: float, reason: str) -> None:
        """`share` from 0 to 1; a bar on a terminal, elsewhere a line for every tenth."""
        percent = round(100 * min(max(share, 0.0), 1.0))
        what = re.sub(r"\s*\d+\s*%", "", reason)  # we say that ourselves
        if self._terminal:
            done = percent * _BAR // 100
            self._bar = f"{_CLEAR}{'█' * done}{'░' * (_BAR - done)} {percent:3d} %  {what}"
            self._write(self._bar)
        elif (told := f"{what}: {percent // 10 * 10} %" if percent else what) != self._told:
            self._told = told
            self.say(told)

    def done(self) -> None:
        """Takes the bar away."""
        if self._bar:
            self._bar = ""
            self._write(_CLEAR)
        self._told = ""

    def _write(self, text: str) -> None:
        self._put(self._stream, text)

    def _put(self, stream: Sink, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
