"""Writes the launcher's output: the lines of every process, labelled with its name, and a progress bar while loading.

Knows no processes. A closed pipe does not stop the server.
"""

import contextlib
import json
import re
import sys
from typing import Protocol

from shared.log import LOG_START, json_line

_COLOURS = ("36", "35", "33", "34", "32", "31")
_BAR_COLUMNS = 30
_CLEAR_LINE = "\r\x1b[K"


class Sink(Protocol):
    """The methods of a text stream that a console needs."""

    def write(self, text: str, /) -> int: ...
    def flush(self) -> None: ...
    def isatty(self) -> bool: ...


class LineSplitter:
    """Splits arbitrary chunks of bytes into lines. A line that is redrawn with \\r keeps only its last state."""

    def __init__(self, limit: int = 1 << 16) -> None:
        self._rest = b""
        self._limit = limit

    def feed(self, data: bytes) -> list[str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._limit:
            lines.append(self._rest)
            self._rest = b""
        return [_text(line) for line in lines]

    def close(self) -> list[str]:
        """Returns the last line if it is unterminated."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


class Console:
    """Writes whole lines. On a terminal, the lines have colours, and a progress bar stays below the lines."""

    def __init__(
        self, stream: Sink, names: tuple[str, ...] = (), data: Sink | None = None, *, as_json: bool = False
    ) -> None:
        """Writes to `stream`.

        names: the names of all processes, which determine the width and the colours of labels.
        data: receives lines of JSON, which are for programs; stdout if None.
        as_json: whether log lines are JSON; all lines then get a field with the name of the process.
        """
        self._as_json = as_json
        self._stream = stream
        self._data = data
        self._is_terminal = stream.isatty() and not as_json
        self._width = max((len(name) for name in names), default=0)
        self._colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
        self._bar = ""  # the bar as drawn now, if the output is a terminal
        self._last_progress = ""  # the last progress line, if the output is not a terminal

    def line(self, name: str, text: str) -> None:
        """Writes one line of the process `name`; a JSON object is written without a label."""
        if self._as_json and not (text.startswith('{"') and not text.startswith(LOG_START)):
            return self._json(name, text)
        if text.startswith('{"') and text.endswith("}"):
            return self._put(self._data or sys.stdout, text + "\n")
        label = f"{name:<{self._width}} |"
        if self._is_terminal and name in self._colours:
            label = f"\x1b[{self._colours[name]}m{label}\x1b[0m"
        self.print(f"{label} {text}")

    def _json(self, name: str, text: str, level: str = "info") -> None:
        if text.startswith(LOG_START):
            self._put(self._stream, f'{{"process":{json.dumps(name)},{text[1:]}\n')
        elif text.strip():
            self._put(self._stream, f"{json_line(level, text, process=name)}\n")

    def print(self, text: str, level: str = "info") -> None:
        """Writes lines of the launcher. level: their severity, which only JSON shows."""
        if self._as_json:
            return self._json("launcher", text.strip(), level)
        self._write(f"{_CLEAR_LINE}{text}\n{self._bar}" if self._bar else f"{text}\n")

    def progress(self, fraction: float, reason: str) -> None:
        """Shows progress: a bar on a terminal, elsewhere a line for every 10 %.

        fraction: the progress, from 0 to 1.
        """
        percent = round(100 * min(max(fraction, 0.0), 1.0))
        activity = re.sub(r"\s*\d+\s*%", "", reason)  # the percentage is added below
        if self._is_terminal:
            done = percent * _BAR_COLUMNS // 100
            self._bar = f"{_CLEAR_LINE}{'█' * done}{'░' * (_BAR_COLUMNS - done)} {percent:3d} %  {activity}"
            self._write(self._bar)
        elif (line := f"{activity}: {percent // 10 * 10} %" if percent else activity) != self._last_progress:
            self._last_progress = line
            self.print(line)

    def clear_progress(self) -> None:
        """Removes the progress bar."""
        if self._bar:
            self._bar = ""
            self._write(_CLEAR_LINE)
        self._last_progress = ""

    def _write(self, text: str) -> None:
        self._put(self._stream, text)

    def _put(self, stream: Sink, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
