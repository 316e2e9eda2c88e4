"""One supervised child process: starts it, relays its output, and restarts it with growing pauses until stopped.

Knows no roles: a `ChildSpec` says what to run, a callback decides which exit codes are final, and watchdog.py decides
whether a child hangs.
"""

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deploy.launcher.console import Console, LineSplitter
from deploy.launcher.watchdog import CHECK_INTERVAL_S, Watchdog, is_stopped
from shared.log import LOG_START

# matches the line that _fail in cli/main.py writes
ERROR_LINE = re.compile(r'sluice [a-z]+: |\{"level":"error",.*"logger":"sluice\.cli"')


async def start_process(
    command: Sequence[str], environment: Mapping[str, str], fds: tuple[int, ...], output: int
) -> Process:
    """Starts a process in a session of its own, so that a Ctrl-C at the terminal reaches only the launcher.

    fds: descriptors that the process inherits. output: the descriptor of its stdout and stderr. Raises OSError.
    """
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=fds,
        env=dict(environment),
        start_new_session=True,
    )


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The description of a child: its name in the log, its command, and the descriptors that it inherits."""

    name: str
    command: Callable[[int], list[str]]  # makes the command from the number of the incarnation: 1, 2, …
    environment: Callable[[int], Mapping[str, str]]
    fds: tuple[int, ...] = ()
    watchdog: Watchdog | None = None  # None: hangs are not detected
    successor: "Callable[[], ChildSpec] | None" = None  # makes a child that takes over while this child still serves
    start: Callable[[Sequence[str], Mapping[str, str], tuple[int, ...], int], Awaitable[Process]] = start_process


@dataclass(slots=True)
class Backoff:
    """Pauses between restarts, in seconds. The pauses double. After a process that lived for `healthy` seconds, they
    start from `first` again."""

    first: float = 0.5
    longest: float = 30.0
    healthy: float = 60.0  # a process that lived this long is not in a crash loop
    _next: float = 0.0

    def after(self, lived: float) -> float:
        """Returns the pause before the next start of a process that lived for `lived` seconds."""
        pause = self.first if lived >= self.healthy or not self._next else self._next
        self._next = min(pause * 2, self.longest)
        return pause


class Child:
    """A supervised child: the successive processes of one `ChildSpec`."""

    def __init__(self, spec: ChildSpec, console: Console, backoff: Backoff, on_exit: Callable[[int], None]) -> None:
        """`on_exit` is called with the pid of every process that ended."""
        self.spec = spec
        self.incarnation = 0
        self.last_line = ""
        self._held_line = ""
        self._console = console
        self._backoff = backoff
        self._on_exit = on_exit
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self._draining = False
        self._was_ready = False
        self._killed_as_hanging = False
        self._hung = False  # whether the process was killed for a hang that its own work caused
        self._output_bytes = 0

    @property
    def pid(self) -> int | None:
        """The pid of the running process; None if none runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def last_error(self) -> str:
        """The message in the last line of output: "no weights" if the line is "sluice worker: no weights"."""
        line = self.last_line
        if line.startswith(LOG_START):
            with contextlib.suppress(ValueError):
                line = str(json.loads(line)["message"])
        prefix, _, message = line.partition(": ")
        return message or prefix

    async def run(self, is_final: Callable[[int], bool]) -> int:
        """Restarts the process until `stop`, or until an exit code is final.

        Returns the last exit code (-9: killed by signal 9). Returns 0 if `stop` comes during the pause before a restart
        and an earlier process had served, because the stop itself is clean.
        """
        while True:
            started = time.monotonic()
            code = await self._run_once()
            if not is_final(code):
                self.show_held_line()
            if self._stopping.is_set() or self._draining or is_final(code):
                return code
            pause = self._backoff.after(math.inf if self._was_ready else time.monotonic() - started)
            self._console.print(f"{self.spec.name} {_describe_exit(code)}; restarting in {pause:g} s", "warning")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
                return 0 if self._was_ready else code

    def show_held_line(self) -> None:
        """Shows the held-back error message, which may say why the process cannot start."""
        if self._held_line:
            self._console.line(self.spec.name, self._held_line)
        self._held_line = ""

    def mark_ready(self) -> None:
        """Records that the current process has served, so that its death does not count as a crash loop."""
        self._was_ready = True

    def stop(self) -> None:
        """Sends SIGTERM and starts no further process; a second call has no effect."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._signal(signal.SIGTERM)

    def drain(self) -> None:
        """Tells the process to serve its connections and then exit; starts no further process."""
        self._draining = True
        if self.pid is None:
            self.stop()
        self._signal(signal.SIGHUP)

    def check(self, elapsed: float) -> None:
        """Kills the process if it hangs, so that it is restarted; `elapsed`: seconds since the last check."""
        ending = self._killed_as_hanging or self._draining or self._stopping.is_set()
        if self.spec.watchdog is None or ending or self.pid is None:
            return
        if reason := self.spec.watchdog.check(elapsed, self._output_bytes):
            self._killed_as_hanging = True
            stopped = is_stopped(self.pid)
            self._hung = not stopped  # if a process was stopped from outside, its own work did not cause the hang
            self._console.print(f"{self.spec.name} hangs: {reason}{' (it is stopped)' if stopped else ''}; killing it")
            self.kill()

    def kill(self) -> None:
        """Kills the process and its children. Unless `stop` was called before, the process is restarted."""
        self._signal(signal.SIGKILL)

    async def _run_once(self) -> int:
        self.incarnation += 1
        self._was_ready = self._killed_as_hanging = self._hung = False
        if self.spec.watchdog is not None:
            self.spec.watchdog.start()
        async with self._output_pipe() as pipe:
            try:
                spec = self.spec
                command, environment = spec.command(self.incarnation), spec.environment(self.incarnation)
                self._process = await spec.start(command, environment, spec.fds, pipe)
            except OSError as error:
                self._console.line(self.spec.name, f"cannot start: {error}")
                return 1
            finally:
                os.close(pipe)
            if self._stopping.is_set():
                self._signal(signal.SIGTERM)
            code = await self._process.wait()
            if self.spec.watchdog is not None:
                self.spec.watchdog.ended(code, hung=self._hung)
            self._on_exit(self._process.pid)
            return code

    def _signal(self, signum: int) -> None:
        if self._process is None or self.pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if signum == signal.SIGKILL:
                os.killpg(self._process.pid, signum)
            else:  # not Process.send_signal, which would reap a process that has just died before asyncio does
                os.kill(self._process.pid, signum)

    @asynccontextmanager
    async def _output_pipe(self) -> AsyncIterator[int]:
        """Yields the write end of a pipe whose lines go to the console.

        With asyncio's own pipe, `Process.wait` would also wait for other processes that hold the pipe open.
        """
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
        )
        relay = asyncio.create_task(self._relay(reader))
        try:
            yield write_end
        finally:
            await asyncio.wait([relay], timeout=1.0)
            relay.cancel()
            transport.close()

    async def _relay(self, reader: asyncio.StreamReader) -> None:
        splitter = LineSplitter()
        while data := await reader.read(1 << 16):
            self._output_bytes += len(data)
            self._show(splitter.feed(data))
        self._show(splitter.close())

    def _show(self, lines: list[str]) -> None:
        for line in lines:
            self.show_held_line()
            if ERROR_LINE.match(line):  # hold the line back: if the process ends for good, the supervisor shows it
                self._held_line = line
            else:
                self._console.line(self.spec.name, line)
            self.last_line = line or self.last_line


async def watch_children(children: Collection[Child]) -> None:
    """Checks for ever whether children hang. The collection of children may change meanwhile."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        now = time.monotonic()
        for child in list(children):
            child.check(now - last)
        last = now


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
