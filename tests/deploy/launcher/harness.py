"""A supervisor whose children are small scripts."""

import asyncio
import contextlib
import io
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from deploy.launcher.child import Backoff, ChildSpec
from deploy.launcher.console import Console
from deploy.launcher.supervisor import Supervisor
from deploy.launcher.watchdog import Timeouts, Watchdog
from shared.heartbeat import Heartbeat
from tests.patience import PATIENCE_S

UNTIL_TERM = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit({code})); print('up', flush=True)\n"

WAIT = "while True: signal.pause()\n"


def script(name: str, code: str, fds: tuple[int, ...] = ()) -> ChildSpec:
    """Returns the spec of a child that runs `code`. In `code`, the variable N is the number of the incarnation."""
    command = [sys.executable, "-I", "-S", "-c"]
    return ChildSpec(name, lambda n: [*command, f"N = {n}\n{code}"], lambda n: dict(os.environ), fds)


def lasting(name: str = "worker", code: int = 0) -> ChildSpec:
    return script(name, UNTIL_TERM.format(code=code) + WAIT)


class Running:
    """A running supervisor and its output."""

    def __init__(self, *specs: ChildSpec, stop_timeout: float = 10.0) -> None:
        self.output = io.StringIO()
        self.exited: list[int] = []
        self.supervisor = Supervisor(
            specs,
            Console(self.output, tuple(spec.name for spec in specs)),
            stop_timeout=stop_timeout,
            backoff=lambda: Backoff(first=0.01, longest=0.02),
            on_exit=self.exited.append,
        )
        self.task = asyncio.create_task(self.supervisor.run())

    @property
    def text(self) -> str:
        return self.output.getvalue()

    async def until(self, *words: str) -> None:
        await until(lambda: all(word in self.text for word in words), lambda: self.text)

    async def result(self) -> int:
        return await asyncio.wait_for(self.task, PATIENCE_S)


async def until(condition: Callable[[], bool], describe: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened; {describe()}"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(*specs: ChildSpec, stop_timeout: float = 10.0) -> AsyncIterator[Running]:
    started = Running(*specs, stop_timeout=stop_timeout)
    try:
        yield started
    finally:
        started.supervisor.request_stop()
        started.supervisor.kill()
        await asyncio.wait_for(asyncio.wait([started.task]), PATIENCE_S)


HEARTBEAT_SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from shared.heartbeat import Phase, Heartbeat
heartbeat = Heartbeat(Path({file!r}))
heartbeat.phase = Phase.SERVING
print("life", N, flush=True)
import signal, os
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGHUP, lambda *_: (print("leaving", flush=True), time.sleep({leaving}), os._exit(0)))
while True:
    heartbeat.alive()
    if N > 1 or {good}:
        heartbeat.progress()
    time.sleep(0.02)
"""


def beating(file: Path, *, good: bool = True, leaving: float = 0.0, successor: ChildSpec | None = None) -> ChildSpec:
    """A child whose heartbeat shows progress from its second process on; if `good`, from its first."""
    code = HEARTBEAT_SCRIPT.format(root=str(Path(__file__).parents[3]), file=str(file), good=good, leaving=leaving)
    spec = script("frontend 0", code)
    watchdog = Watchdog(Heartbeat(file), Timeouts(0.6, 60.0))
    return ChildSpec(spec.name, spec.command, spec.environment, watchdog=watchdog, successor=lambda: successor or spec)
