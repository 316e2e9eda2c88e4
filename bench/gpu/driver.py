"""Runs the tasks in a process of their own, and in another one when that dies, hangs or breaks its device.

A kernel that faults leaves its process without a device, and one that hangs leaves it for ever; what was measured
before stays, and what comes after is measured by the next process.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from bench.client.server import BenchError
from bench.gpu.sections import NOTE, Options, Task
from bench.gpu.tables import Table

GRACE_S = 10.0  # past the budget, for a task that is nearly through
STDERR = 2
START_S = 120.0  # until a process says its first word


def _asked(task: Task) -> dict[str, Any]:
    section = task.section
    return {"call": section.call, "argument": task.argument, "first": section.columns[0], "need_s": section.need_s}


class Ended(Exception):
    """Somebody wants this to end now: what was measured stays."""


@dataclass(slots=True)
class Drive:
    """`on_table` is called with each section's table when it is whole, `on_news` when there is a row more."""

    options: Options
    deadline: float  # seconds since the epoch
    log: IO[bytes] | None
    on_table: Callable[[Table], None]
    on_news: Callable[[], None] = lambda: None
    facts: dict[str, float] = field(default_factory=dict)
    about: list[str] = field(default_factory=list)  # what a process said of its machine
    tables: dict[str, Table] = field(default_factory=dict)

    def run(self, tasks: list[Task]) -> list[Table]:
        """All tables, in order. A process that dies costs the task it was at, and so does an `Ended`, the last."""
        queue, why = list(tasks), "no time is left"
        with TemporaryDirectory(prefix="sluice-bench-") as folder:
            try:
                self._work(queue, folder)
            except Ended:
                why = "it was ended"
                if queue:
                    self._end(queue, why)
        self._leave_out(queue, why)
        return list(self.tables.values())

    def _work(self, queue: list[Task], folder: str) -> None:
        while queue and not self._late:
            before = len(queue)
            with _Child(self._order(queue, folder), self.log) as child:
                self._follow(child, queue)
            if len(queue) == before and not self._late:
                self._give_up(queue)

    @property
    def _late(self) -> bool:
        return time.time() >= self.deadline

    def _give_up(self, queue: list[Task]) -> None:
        """A process never began: nor would another."""
        while queue:
            self._end(queue, "the process that was to measure it did not start")

    def _leave_out(self, queue: list[Task], why: str) -> None:
        while queue:
            section, argument = queue[0].section, queue[0].argument
            self._table(queue[0]).add({section.columns[0]: argument or section.name, NOTE: f"left out: {why}"})
            self._end(queue, "")

    def _order(self, queue: list[Task], folder: str) -> dict[str, Any]:
        options = asdict(self.options) | {"trace": str(self.options.trace or "")}
        return {
            "tasks": [_asked(task) for task in queue],
            "options": options, "facts": self.facts, "deadline": self.deadline,
            "folder": folder, "parent": os.getpid(),
        }  # fmt: skip

    def _follow(self, child: "_Child", queue: list[Task]) -> None:
        """Until it is through, or has to be ended."""
        begun = False
        child.allow(START_S, self.deadline + GRACE_S)
        for event in child.events():
            match event:
                case {"begin": _}:
                    begun = True
                    child.allow(queue[0].section.cap_s, self.deadline + GRACE_S)
                case {"row": row}:
                    self._table(queue[0]).add(row)
                    self.on_news()
                case {"fact": fact}:
                    self.facts.update(fact)
                case {"refused": why}:
                    raise BenchError(why)
                case {"about": line}:
                    if line not in self.about:
                        self.about.append(line)
                case {"end": seconds, "failed": why, "broken": broken}:
                    self._table(queue[0]).seconds += seconds
                    self._end(queue, why)
                    begun = False
                    child.allow(START_S, self.deadline + GRACE_S)
                    if broken:
                        return
        if queue and begun:
            self._end(queue, child.why())

    def _end(self, queue: list[Task], failed: str) -> None:
        """The first task is over; the table is handed out with its last one."""
        task = queue.pop(0)
        table = self._table(task)
        if failed:
            table.fail(task.argument, failed)
        self.on_news()
        if not queue or queue[0].section is not task.section:
            self.on_table(table)

    def _table(self, task: Task) -> Table:
        return self.tables.setdefault(task.section.name, Table(task.section))


class _Child:
    """One measuring process; `events` are the lines of JSON it writes."""

    def __init__(self, order: dict[str, Any], log: IO[bytes] | None) -> None:
        ours, theirs = os.pipe()
        self._pipe = ours
        self._why, self._limit = "", 0.0
        root = Path(__file__).parents[2]
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.measuring_process", str(theirs)],
            stdin=subprocess.PIPE, stdout=log or STDERR, stderr=log, pass_fds=(theirs,), start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        os.close(theirs)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode())
            self._process.stdin.close()

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever it started goes with it."""
        os.close(self._pipe)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def allow(self, seconds: float, at_most: float) -> None:
        """So long from now, but not beyond a time (seconds since the epoch)."""
        self._limit = min(time.time() + seconds, at_most)

    def events(self) -> Iterator[dict[str, Any]]:
        """Until it ends, or the time that it was allowed has passed."""
        rest = b""
        while True:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, self._limit - time.time()))
            if not ready:
                self._why = "it took too long and was ended"
                return
            data = os.read(self._pipe, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from map(json.loads, lines)

    def why(self) -> str:
        """Why there are no more events."""
        if self._why:
            return self._why
        code = self._process.wait()
        return f"its process ended with {signal.Signals(-code).name if code < 0 else code}"
