"""Runs the tasks in a separate process, and starts a new process when it dies, hangs or breaks its device.

A kernel that faults makes the device unusable for its process, and a kernel that hangs never returns. Earlier results
are kept, and the next process measures the remaining tasks.
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
from bench.gpu.sections import COMPILING, NOTE, Options, Task
from bench.gpu.tables import Table

GRACE_S = 10.0  # a task may exceed the time budget by these seconds, so that it can finish
STDERR = 2
TOOK_TOO_LONG = "it took too long and was ended"
START_S = 120.0  # time limit for the first event of a process


def _task_message(task: Task) -> dict[str, Any]:
    section = task.section
    return {"call": section.call, "argument": task.argument, "first": section.columns[0], "need_s": section.need_s}


class Interrupted(Exception):
    """Raised when the user ends the measurement. Results so far are kept."""


@dataclass(slots=True)
class Driver:
    """Runs tasks. on_table: called with each section's complete table. on_row: called after every new row."""

    options: Options
    deadline: float  # seconds since the epoch
    log: IO[bytes] | None
    on_table: Callable[[Table], None]
    on_row: Callable[[], None] = lambda: None
    limits: dict[str, float] = field(default_factory=dict)
    about: list[str] = field(default_factory=list)  # descriptions of the machine
    tables: dict[str, Table] = field(default_factory=dict)

    def run(self, tasks: list[Task]) -> list[Table]:
        """Runs the tasks and returns all tables, in order.

        When a process dies, its current task is lost. `Interrupted` loses the current task too, and ends the run.
        """
        queue, reason = list(tasks), "no time is left"
        with TemporaryDirectory(prefix="sluice-bench-") as folder:
            try:
                self._run_processes(queue, folder)
            except Interrupted:
                reason = "it was ended"
                if queue:
                    self._end(queue, reason)
        self._skip_rest(queue, reason)
        self._show_compilations()
        return list(self.tables.values())

    def _show_compilations(self) -> None:
        compiled = [table for table in self.tables.values() if table.compilations]
        if not compiled:
            return
        shown = self.tables[COMPILING.name] = Table(COMPILING)
        for table in compiled:
            times = table.compilations
            shown.add({"section": table.section.name, "compiled": len(times), "s": sum(times)})
        self.on_row()
        self.on_table(shown)

    def _run_processes(self, queue: list[Task], folder: str) -> None:
        while queue and not self._budget_spent:
            before = len(queue)
            with _MeasuringProcess(self._message(queue, folder), self.log) as process:
                self._collect(process, queue)
            if len(queue) == before and not self._budget_spent:
                self._fail_all(queue)

    @property
    def _budget_spent(self) -> bool:
        return time.time() >= self.deadline

    def _fail_all(self, queue: list[Task]) -> None:
        """Fails all remaining tasks, because a process did not start, and another one would not start either."""
        while queue:
            self._end(queue, "the process that was to measure it did not start")

    def _skip_rest(self, queue: list[Task], reason: str) -> None:
        while queue:
            section, argument = queue[0].section, queue[0].argument
            self._table(queue[0]).add({section.columns[0]: argument or section.name, NOTE: f"left out: {reason}"})
            self._end(queue, "")

    def _message(self, queue: list[Task], folder: str) -> dict[str, Any]:
        options = asdict(self.options)
        options |= {name: str(options[name] or "") for name in ("trace", "tiles")}
        return {
            "tasks": [_task_message(task) for task in queue],
            "options": options, "facts": self.limits, "deadline": self.deadline,
            "folder": folder, "parent": os.getpid(),
        }  # fmt: skip

    def _collect(self, process: "_MeasuringProcess", queue: list[Task]) -> None:
        """Collects events until the process has finished or must be ended."""
        begun = False
        process.set_limit(START_S, self.deadline + GRACE_S)
        for event in process.events():
            match event:
                case {"begin": _}:
                    begun = True
                    process.set_limit(queue[0].section.cap_s, self.deadline + GRACE_S)
                case {"row": row}:
                    self._table(queue[0]).add(row)
                    self.on_row()
                case {"fact": fact}:
                    self.limits.update(fact)
                case {"compiled": seconds}:
                    self._table(queue[0]).compilations.append(seconds)
                    process.extend_limit(seconds, self.deadline + GRACE_S)
                case {"refused": reason}:
                    raise BenchError(reason)
                case {"about": line}:
                    if line not in self.about:
                        self.about.append(line)
                case {"end": seconds, "failed": reason, "broken": broken}:
                    self._table(queue[0]).seconds += seconds
                    self._end(queue, reason)
                    begun = False
                    process.set_limit(START_S, self.deadline + GRACE_S)
                    if broken:
                        return
        if queue and begun:
            self._end(queue, process.exit_reason())

    def _end(self, queue: list[Task], failed: str) -> None:
        """Removes the first task from the queue. After the last task of a section, reports the section's table.

        failed: the reason if the task failed, else empty.
        """
        task = queue.pop(0)
        table = self._table(task)
        if failed:
            table.fail(task.argument, failed)
        self.on_row()
        if not queue or queue[0].section is not task.section:
            self.on_table(table)

    def _table(self, task: Task) -> Table:
        return self.tables.setdefault(task.section.name, Table(task.section))


class _MeasuringProcess:
    """One measuring process. `events` yields the JSON lines that the process writes."""

    def __init__(self, order: dict[str, Any], log: IO[bytes] | None) -> None:
        read_end, write_end = os.pipe()
        self._pipe = read_end
        self._reason, self._limit = "", 0.0
        root = Path(__file__).parents[2]
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.measuring_process", str(write_end)],
            stdin=subprocess.PIPE, stdout=log or STDERR, stderr=log, pass_fds=(write_end,), start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        os.close(write_end)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode())
            self._process.stdin.close()

    def __enter__(self) -> "_MeasuringProcess":
        return self

    def __exit__(self, *_: object) -> None:
        """Kills the process and its children."""
        os.close(self._pipe)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def set_limit(self, seconds: float, at_most: float) -> None:
        """Sets the time limit: `seconds` from now, but not beyond `at_most` (seconds since the epoch)."""
        self._limit = min(time.time() + seconds, at_most)

    def extend_limit(self, seconds: float, at_most: float) -> None:
        self._limit = min(self._limit + seconds, at_most)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yields events until the process ends or its time limit has passed."""
        rest = b""
        while True:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, self._limit - time.time()))
            if not ready:
                self._reason = TOOK_TOO_LONG
                return
            data = os.read(self._pipe, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from map(json.loads, lines)

    def exit_reason(self) -> str:
        """Returns the reason why there are no more events."""
        if self._reason:
            return self._reason
        code = self._process.wait()
        return f"its process ended with {signal.Signals(-code).name if code < 0 else code}"
