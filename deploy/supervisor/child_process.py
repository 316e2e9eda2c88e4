"""One supervised process: started, its lines relayed, started again with growing pauses until told to stop.

Knows no roles: what to run comes as a `ChildSpec`, which exit codes are final comes as a function, and what a hang
is, watchdog.py knows.
"""

import asyncio
import contextlib
import math
import os
import signal
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deploy.supervisor.console import Console, LineSplitter
from deploy.supervisor.watchdog import TICK_S, Watchdog, is_stopped


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What a child is: its name in the log, its command, and what it inherits."""

    name: str
    command: Callable[[int], list[str]]  # by incarnation: 1, 2, …
    environment: Callable[[int], Mapping[str, str]]
    fds: tuple[int, ...] = ()
    watch: Watchdog | None = None  # its sign of life; none: it is left alone as long as it lives
    successor: "Callable[[], ChildSpec] | None" = None  # who can take its place while it still serves


@dataclass(slots=True)
class Backoff:
    """Pauses between restarts in seconds: doubling, and short again after a healthy life."""

    first: float = 0.5
    longest: float = 30.0
    healthy: float = 60.0  # a life this long was no crash loop
    _next: float = 0.0

    def after(self, lived: float) -> float:
        """The pause before the next start, of a process that lived this long."""
        pause = self.first if lived >= self.healthy or not self._next else self._next
        self._next = min(pause * 2, self.longest)
        return pause


class Child:
    """The processes of one role, one after another."""

    def __init__(self, role: ChildSpec, console: Console, backoff: Backoff, gone: Callable[[int], None]) -> None:
        """`gone` is called with the pid of every process that ended."""
        self.role = role
        self.incarnation = 0
        self.last_line = ""
        self._console = console
        self._backoff = backoff
        self._gone = gone
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self._leaving = False
        self._served = False
        self._condemned = False  # killed as hanging
        self._hung = False
        self._heard = 0  # bytes it wrote

    async def keep(self, final: Callable[[int], bool]) -> int:
        """Runs until `stop`, or until an exit code is final; returns the last one (-9: killed by signal 9)."""
        while True:
            started = time.monotonic()
            code = await self._live()
            if self._stopping.is_set() or self._leaving or final(code):
                return code
            pause = self._backoff.after(math.inf if self._served else time.monotonic() - started)
            self._console.say(f"{self.role.name} {_how(code)}; starting it again in {pause:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
                return code

    def served(self) -> None:
        """The process that runs did its work: should it die, that is no crash loop."""
        self._served = True

    def stop(self) -> None:
        """Asks the process to end and starts no other; a second call changes nothing."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._signal(signal.SIGTERM)

    def leave(self) -> None:
        """Asks the process to serve those it is connected with, and then to end; no other is started."""
        self._leaving = True
        if self._process is None or self._process.returncode is not None:
            self.stop()
        self._signal(signal.SIGHUP)

    def look(self, elapsed: float) -> None:
        """Kills the process if it hangs, so that it is started again; `elapsed` seconds since the last look."""
        ending = self._condemned or self._leaving or self._stopping.is_set()
        if self.role.watch is None or ending or self._process is None or self._process.returncode is not None:
            return
        if why := self.role.watch.look(elapsed, self._heard):
            self._condemned = True
            stopped = is_stopped(self._process.pid)
            self._hung = not stopped  # whoever was stopped by somebody did not hang of its work
            self._console.say(f"{self.role.name} hangs: {why}{' (it is stopped)' if stopped else ''}; killing it")
            self.kill()

    def kill(self) -> None:
        """Ends the process and what it started, at once. Without `stop` before, it is started again."""
        self._signal(signal.SIGKILL)

    async def _live(self) -> int:
        self.incarnation += 1
        self._served = self._condemned = self._hung = False
        if self.role.watch is not None:
            self.role.watch.begin()
        async with self._log() as end:
            try:
                self._process = await self._start(end)
            except OSError as error:
                self._console.line(self.role.name, f"cannot start: {error}")
                return 1
            finally:
                os.close(end)
            if self._stopping.is_set():
                self._signal(signal.SIGTERM)
            code = await self._process.wait()
            if self.role.watch is not None:
                self.role.watch.ended(code, hung=self._hung)
            self._gone(self._process.pid)
            return code

    async def _start(self, output: int) -> Process:
        return await asyncio.create_subprocess_exec(
            *self.role.command(self.incarnation),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=self.role.fds,
            env=dict(self.role.environment(self.incarnation)),
            start_new_session=True,  # a Ctrl-C at the terminal reaches the launcher only, which passes it on
        )

    def _signal(self, signum: int) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if signum == signal.SIGKILL:
                os.killpg(self._process.pid, signum)
            else:
                self._process.send_signal(signum)

    @asynccontextmanager
    async def _log(self) -> AsyncIterator[int]:
        """The writing end of a pipe whose lines go to the console.

        A pipe of our own: asyncio's would make `wait` wait for whoever else holds it open.
        """
        reading, writing = os.pipe()
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", 0)
        )
        relay = asyncio.create_task(self._relay(reader))
        try:
            yield writing
        finally:
            await asyncio.wait([relay], timeout=1.0)
            relay.cancel()
            transport.close()

    async def _relay(self, reader: asyncio.StreamReader) -> None:
        lines = LineSplitter()
        while data := await reader.read(1 << 16):
            self._heard += len(data)
            self._show(lines.feed(data))
        self._show(lines.close())

    def _show(self, lines: list[str]) -> None:
        for line in lines:
            self._console.line(self.role.name, line)
            self.last_line = line or self.last_line


async def watch_children(children: Collection[Child]) -> None:
    """Looks at all that are in the collection, for ever, so that none of them hangs."""
    before = time.monotonic()
    while True:
        await asyncio.sleep(TICK_S)
        now = time.monotonic()
        for child in list(children):
            child.look(now - before)
        before = now


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
