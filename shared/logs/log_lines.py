"""The log lines of a process: readable ones, or with `--log-format json` one JSON object each.

Knows logging and standard error, but no processes or requests. With JSON, everything that Python code writes to
standard error becomes a log line, too: warnings, tracebacks and prints of libraries.
"""

import io
import json
import logging
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

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
