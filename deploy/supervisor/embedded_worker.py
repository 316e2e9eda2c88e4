"""One worker for one Python process: started in a run folder of its own, ended with it, started again if it crashes.

Knows processes; not what the worker is asked. The worker dies with the process, however that ends (tether.py), and
its lines go to the log named `sluice.worker`.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from deploy.supervisor.child_command import WORKER_FLAGS, CliError, command, environment
from deploy.supervisor.child_process import Backoff, Child, ChildSpec, watch_children
from deploy.supervisor.console import Console
from deploy.supervisor.run_dir import run_dir
from deploy.supervisor.serve import watchdog_for
from shared.config import Settings, WireConfig, with_values

log = logging.getLogger("sluice.worker")


class EmbeddedWorker:
    """The worker while it runs. Where it is met is `wire`."""

    def __init__(self, settings: Settings) -> None:
        self.wire: WireConfig = settings.wire
        self._was_ready = False
        self._child = Child(_role(settings), _ToLog(), Backoff(), gone=lambda pid: None)
        self._keeper = asyncio.create_task(self._child.keep(lambda code: not self._was_ready))
        self._guard = asyncio.create_task(watch_children([self._child]))

    def raise_if_ended(self) -> None:
        """Raises Failure, with the worker's last words, if it has ended for good."""
        if self._keeper.done():
            said = self._child.last_line.partition(": ")  # "sluice worker: it cannot because"
            raise CliError(f"the worker cannot start: {said[2] or said[0] or 'it said nothing'}", 1)

    def mark_ready(self) -> None:
        """It has been ready: from now on it is started again whenever it dies."""
        self._was_ready = True

    async def kill(self) -> None:
        """At once: whoever asked it for something has left, and it keeps nothing."""
        self._guard.cancel()
        self._child.stop()
        self._child.kill()
        await self._keeper


@asynccontextmanager
async def embedded_worker(settings: Settings) -> AsyncIterator[EmbeddedWorker]:
    """A worker for the length of the `async with`. Must run in a thread that lives as long: on Linux a process is
    tied to the thread that started it. Raises RunDirError."""
    with run_dir(settings.wire.run_dir) as folder:
        owned = EmbeddedWorker(with_values(settings, {"run_dir": str(folder)}))
        try:
            yield owned
        finally:
            await owned.kill()


class _ToLog(Console):
    """A console that nobody looks at: what a process says is information, what the keeper says a warning."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def line(self, name: str, text: str) -> None:
        log.info("%s", text)

    def say(self, text: str) -> None:
        log.warning("%s", text)


def _role(settings: Settings) -> ChildSpec:
    watch = watchdog_for(settings, Path(settings.wire.run_dir), "worker.heartbeat")
    words = [*command("worker", settings, WORKER_FLAGS), f"--heartbeat={watch.heartbeat.file}"]
    return ChildSpec("worker", lambda _: words, lambda n: environment() | {"SLUICE_EPOCH": str(n)}, watch=watch)
