"""`sluice batch FILE`: has the lines of a JSONL file answered by a server, and writes their outcomes to another file.

Outcomes are added to OUT.part as they come, in one write each. When all lines have one, they are put in the order of
the input as OUT. So a command that was interrupted or killed goes on where it was when it is given again.
"""

import argparse
import errno
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from deploy.cli.http_client import DEFAULT_URL, Server, add_key
from deploy.cli.run import served
from deploy.launcher.child_command import CliError
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, new_file, positive_int

PASSING = frozenset({429, 502, 503, 529})  # statuses of a server that is busy, loads or restarts
PATIENCE_S = 600.0  # how long a line is sent again to a server that is busy or gone
PAUSE_S = 1.0  # between two attempts
BAR_CHARS, BAR_S = 30, 0.2  # width of the progress bar, and the interval at which it is drawn
PLAIN_S = 10.0  # the same where no terminal shows it


def parser() -> Parser:
    parser = Parser(
        prog="sluice batch",
        description="Have the lines of a file answered: each a request with custom_id, url and body, as in OpenAI's "
        "batches. Given again, the command goes on where it was.",
    )
    parser.add_argument("file", metavar="FILE", help="JSONL with {custom_id, url, body} a line")
    parser.add_argument("--out", metavar="FILE", type=new_file, help="where the outcomes go [FILE with .out.jsonl]")
    parser.add_argument("--url", default="", help=f"the server [{DEFAULT_URL}]")
    parser.add_argument("--model", default="", help="start a server with this model, and end it afterwards")
    parser.add_argument("--concurrency", metavar="N", type=positive_int, default=8, help="lines answered at a time [8]")
    add_key(parser)
    return parser


def batch(words: Sequence[str]) -> int:
    """Runs the command. Returns 0 if all lines were answered with 200, else 1. Raises CliError and ConfigError."""
    args = parser().read(list(words))
    if args.url and args.model:
        raise ConfigError("--url and --model exclude each other: a server is used, or started")
    source = Path(args.file)
    asked = read_lines(source)
    out: Path = args.out or source.with_suffix(".out.jsonl")
    if out.exists() and out.samefile(source):
        raise ConfigError(f"--out {out} is the file of the requests, which would be lost")
    with closing(Progress(out.with_name(out.name + ".part"), asked)) as progress:
        left = [one for one in asked if one.custom_id not in progress.outcomes]
        with _url(args, bool(left)) as url, progress.drawn(sys.stderr):
            if left:
                _answer_all(Server(url, args.api_key), left, progress, args.concurrency)
        progress.finish(out)
    print(f"{len(asked) - progress.failed} of {len(asked)} lines were answered, in {out}", file=sys.stderr)
    return 1 if progress.failed else 0


@contextmanager
def _url(args: argparse.Namespace, needed: bool) -> Iterator[str]:
    """Yields the URL of the server, which is started if a model is named."""
    if not (args.model and needed):
        yield args.url or DEFAULT_URL
        return
    with served([f"--model={args.model}"], sys.stderr) as url:
        yield url


@dataclass(frozen=True, slots=True)
class Asked:
    """A line of the input file."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_lines(path: Path) -> list[Asked]:
    """Reads the input. Raises CliError, which names the line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}", 2) from error
    found: dict[str, Asked] = {}
    for number, data in enumerate(lines, 1):
        if not data.strip():
            continue
        try:
            one = json.loads(data)
            line = Asked(one["custom_id"], one["url"], one["body"])
        except (ValueError, TypeError, KeyError) as error:
            raise CliError(
                f"{path}, line {number}: needs an object with custom_id, url and body ({error})", 2
            ) from None
        problem = _problem(line, found)
        if problem:
            raise CliError(f"{path}, line {number}: {problem}", 2)
        found[line.custom_id] = line
    if not found:
        raise CliError(f"{path} has no lines", 2)
    return list(found.values())


def _problem(line: Asked, before: dict[str, Asked]) -> str:
    """Returns what is wrong with a line; empty if nothing is."""
    if not isinstance(line.custom_id, str) or not line.custom_id:
        return "`custom_id` must be a text"
    if line.custom_id in before:
        return f"`custom_id` {line.custom_id!r:.80} is that of an earlier line"
    if not isinstance(line.url, str) or not line.url.startswith("/"):
        return "`url` must be a path such as /v1/chat/completions"
    if not isinstance(line.body, dict) or line.body.get("stream"):
        return "`body` must be an object without `stream`"
    return ""


@dataclass
class Progress:
    """The outcomes so far, which lie in the file `part`. Reads those of an earlier run; a torn line is dropped."""

    part: Path
    asked: Sequence[Asked]
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._began, known, self._waits_for = time.monotonic(), {one.custom_id for one in self.asked}, ""
        # unbuffered, so that what a full disk did not take is not written once more when the file is closed
        self._file: BinaryIO = open(self.part, "a+b", buffering=0)  # noqa: SIM115
        self._lock_file()
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            outcome = self._read(number, line)
            if outcome["custom_id"] in known:
                self.outcomes[outcome["custom_id"]] = outcome
        self._file.truncate(len(whole))
        self._size = len(whole)
        self._before = len(self.outcomes)

    def _lock_file(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise CliError(f"{self.part}: another `sluice batch` writes this file", 1) from error

    def _read(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            outcome: dict[str, Any] = json.loads(line)
            int(outcome["response"]["status_code"])
            str.encode(outcome["custom_id"])
        except (ValueError, TypeError, KeyError) as error:
            self._file.close()
            raise CliError(
                f"{self.part}, line {number}, was not written by sluice batch: name another --out, or delete it", 2
            ) from error
        return outcome

    @property
    def failed(self) -> int:
        return sum(one["response"]["status_code"] != 200 for one in list(self.outcomes.values()))

    def add(self, one: Asked, status: int, body: bytes, request_id: str) -> None:
        """Writes the outcome of a line."""
        try:
            value = json.loads(body)
        except ValueError:
            value = body.decode(errors="replace")
        response = {"status_code": status, "request_id": request_id, "body": value}
        outcome = {"id": request_id, "custom_id": one.custom_id, "response": response, "error": None}
        data = json.dumps(outcome, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            self._write(data)
            self.outcomes[one.custom_id] = outcome

    def _write(self, data: bytes) -> None:
        try:
            if (written := self._file.write(data)) != len(data):
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were written")
        except OSError as error:
            self._file.truncate(self._size)
            raise CliError(
                f"{self.part} cannot be written: {error.strerror}; give the command again to go on", 1
            ) from error
        self._size += len(data)

    def wait(self, reason: str) -> None:
        """Makes the progress line say why the batch waits. An empty text: it goes on"""
        self._waits_for = reason

    def finish(self, out: Path) -> None:
        """Writes all outcomes in the order of the input, and removes the file of those so far."""
        ordered = self.part.with_name(self.part.name + ".sorted")
        try:
            with ordered.open("w", encoding="utf-8") as file:
                for one in self.asked:
                    file.write(json.dumps(self.outcomes[one.custom_id], ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            ordered.replace(out)
        except OSError as error:
            ordered.unlink(missing_ok=True)
            raise CliError(f"{out} cannot be written: {error.strerror}; give the command again to go on", 1) from error
        self.part.unlink()

    def close(self) -> None:
        """Closes the file, which stays if lines are left."""
        self._file.close()

    @contextmanager
    def drawn(self, stream: TextIO) -> Iterator[None]:
        """Draws the progress while the block runs."""
        done = threading.Event()
        thread = threading.Thread(target=self._draw, args=(stream, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _draw(self, stream: TextIO, done: threading.Event) -> None:
        shows = stream.isatty()
        while True:
            ended = done.wait(BAR_S if shows else PLAIN_S)
            stream.write(f"\r{self.line()}\x1b[K" if shows else f"{self.line()}\n")
            stream.flush()
            if ended:
                stream.write("\n" if shows else "")
                return

    def line(self) -> str:
        """Returns the progress as a line of text."""
        count, total = len(self.outcomes), len(self.asked)
        filled = BAR_CHARS * count // total
        speed = (count - self._before) / max(1e-9, time.monotonic() - self._began)
        failed = f"  {self.failed} failed" if self.failed else ""
        waits = f" {self._waits_for} " if self._waits_for else ""
        return f"[{'#' * filled}{' ' * (BAR_CHARS - filled)}] {count}/{total}{failed}  {speed:.1f}/s {waits}"


def _answer_all(server: Server, left: Sequence[Asked], progress: Progress, concurrency: int) -> None:
    """Has lines answered, a few at a time. Raises CliError if the server stays away; outcomes so far are kept."""
    stopped = threading.Event()
    with ThreadPoolExecutor(concurrency, "batch") as threads:
        try:
            for done in as_completed([threads.submit(_answer, server, one, progress, stopped) for one in left]):
                done.result()
        finally:
            stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)
            server.abort()


def _answer(server: Server, one: Asked, progress: Progress, stopped: threading.Event) -> None:
    """Sends a line and returns its answer. Sends it again while the server is busy or gone."""
    deadline = time.monotonic() + PATIENCE_S
    while not stopped.is_set():
        try:
            status, body, request_id = server.exchange(one.url, one.body)
        except CliError as error:
            if time.monotonic() > deadline:
                raise CliError(f"{error}; give the command again to go on", 1) from error
            progress.wait(f"{error}; trying again")
        else:
            if status not in PASSING or time.monotonic() > deadline:
                progress.add(one, status, body, request_id)
                progress.wait("")
                return
            progress.wait(f"{server.url} answers {status}; trying again")
        stopped.wait(PAUSE_S)
