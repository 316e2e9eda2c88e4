"""A worker owned by one Python process, for `LLM`: starts it in its own run folder and restarts it if it crashes.

Knows processes, not requests. The worker dies with its Python process, whatever the cause (child_command.py). The
worker's output goes to the logger `sluice.worker`.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from deploy.launcher.child import Backoff, Child, ChildSpec, watch_children
from deploy.launcher.child_command import WORKER_FLAGS, CliError, child_environment, command_line
from deploy.launcher.console import Console
from deploy.launcher.run_dir import run_dir
from deploy.launcher.serve import watchdog_for
from shared.config.settings import Settings, WireConfig, with_values

log = logging.getLogger("sluice.worker")


class EmbeddedWorker:
    """A running worker; `wire` has its addresses."""

    def __init__(self, settings: Settings) -> None:
        self.wire: WireConfig = settings.wire
        self._was_ready = False
        self._child = Child(_spec(settings), _LogConsole(), Backoff(), on_exit=lambda pid: None)
        self._run = asyncio.create_task(self._child.run(lambda code: not self._was_ready))
        self._watch = asyncio.create_task(watch_children([self._child]))

    def raise_if_ended(self) -> None:
        """Raises CliError with the worker's last line if the worker has ended for good."""
        if self._run.done():
            raise CliError(f"the worker cannot start: {self._child.last_error or 'it printed nothing'}", 1)

    def mark_ready(self) -> None:
        """Records that the worker has served: from now on, it is restarted whenever it dies."""
        self._was_ready = True

    async def kill(self) -> None:
        """Kills the worker without draining: no client is left, and the worker keeps no state."""
        self._watch.cancel()
        self._child.stop()
        self._child.kill()
        await self._run


@asynccontextmanager
async def embedded_worker(settings: Settings) -> AsyncIterator[EmbeddedWorker]:
    """Runs a worker for the duration of the `async with`. Raises RunDirError.

    Call it in a thread that outlives the worker: on Linux the worker is killed when the thread that started it ends
        (child_command.py).
    """
    with run_dir(settings.wire.run_dir) as folder:
        worker = EmbeddedWorker(with_values(settings, {"run_dir": str(folder)}))
        try:
            yield worker
        finally:
            await worker.kill()


class _LogConsole(Console):
    """A console that logs the worker's lines as information and the launcher's as warnings."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def line(self, name: str, text: str) -> None:
        log.info("%s", text)

    def print(self, text: str, level: str = "info") -> None:
        log.warning("%s", text)


def _spec(settings: Settings) -> ChildSpec:
    watchdog = watchdog_for(settings, Path(settings.wire.run_dir), "worker.heartbeat")
    argv = [*command_line("worker", settings, WORKER_FLAGS), f"--heartbeat={watchdog.heartbeat.file}"]
    return ChildSpec(
        "worker", lambda _: argv, lambda n: child_environment() | {"SLUICE_EPOCH": str(n)}, watchdog=watchdog
    )
