"""The supervisor behind `sluice serve`: one worker and N frontends, kept alive until told to stop.

Holds what must outlive its children (the run folder, the listening sockets) and knows nothing of what they
compute: it sees exit codes, log lines and /ready. Children die with it, however it dies (tether.py).
"""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from deploy.child import Backoff, Child, Role
from deploy.listen import is_taken, listen, reachable, url
from deploy.logs import Console
from deploy.roles import FRONTEND_FLAGS, WORKER_FLAGS
from deploy.roles import command as _command
from deploy.roles import environment as _environment
from deploy.rundir import run_dir
from deploy.watch import Health, ask, welcome
from shared.config import Settings, with_values

CANNOT_SERVE = (2, 3)  # exit codes that will not get better: bad settings, a model that cannot be served


class Supervisor:
    """Children and their fate. `run` returns the exit code of the whole."""

    def __init__(
        self,
        roles: Sequence[Role],
        console: Console,
        *,
        stop_timeout: float,
        backoff: Callable[[], Backoff] = Backoff,
        gone: Callable[[int], None] = lambda pid: None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.ready_once = False
        self._console = console
        self._stop_timeout = stop_timeout
        self._on_stop = on_stop
        self._asked = asyncio.Event()  # to stop
        self._children = [Child(role, console, backoff(), gone) for role in roles]

    def ask_to_stop(self) -> None:
        """First call: children get SIGTERM and their time; second: they are killed."""
        if self._asked.is_set():
            self._kill()
        self._asked.set()

    def served(self) -> None:
        """Every child does its work."""
        self.ready_once = True
        for child in self._children:
            child.served()

    def restart(self, name: str) -> None:
        """Kills a child that hangs; it is started again like one that died."""
        for child in self._children:
            if child.role.name == name:
                child.kill()

    async def run(self) -> int:
        with _signals(self.ask_to_stop):
            tasks = {asyncio.create_task(child.keep(self._final)): child for child in self._children}
            asked = asyncio.create_task(self._asked.wait())
            ended, _ = await asyncio.wait({*tasks, asked}, return_when=asyncio.FIRST_COMPLETED)
            failed = [task for task in tasks if task in ended]
            codes = await self._stop(list(tasks))
            asked.cancel()
            for task in failed:  # last, so that it is what stays on the screen
                self._explain(tasks[task])
            return failed[0].result() if failed else _verdict(codes)

    def _final(self, code: int) -> bool:
        return code in CANNOT_SERVE and not self.ready_once

    def _explain(self, child: Child) -> None:
        self._console.done()
        said = child.last_line.partition(": ")  # "sluice worker: it cannot because"
        self._console.say(f"sluice serve: the {child.role.name} cannot start: {said[2] or said[0]}")

    async def _stop(self, tasks: list[asyncio.Task[int]]) -> list[int]:
        self._on_stop()
        for child in self._children:
            child.stop()
        _, late = await asyncio.wait(tasks, timeout=self._stop_timeout)
        if late:
            self._console.say(f"sluice: not all processes ended in {self._stop_timeout:g} s, killing them")
            self._kill()
        return list(await asyncio.gather(*tasks))

    def _kill(self) -> None:
        for child in self._children:
            child.stop()
            child.kill()


async def follow(
    supervisor: Supervisor, console: Console, address: tuple[str, int], text: str, *, calm: float = 2.0
) -> None:
    """Shows loading, prints `text` once the server is ready, and afterwards every change of mind.

    Asks five times a second until it is ready, then every `calm` seconds.
    """
    before = Health()
    while True:
        health = await ask(*address) or Health()
        if health.ready and not before.ready:
            console.done()
            console.say("ready again" if supervisor.ready_once else text)
        elif before.ready and not health.ready:
            console.say(f"not ready: {health.reason}")
        elif not health.ready and not supervisor.ready_once:
            console.progress(health.progress, health.reason)
        if health.ready:
            supervisor.served()
        before = health
        await asyncio.sleep(calm if health.ready else 0.2)


def serve(settings: Settings, asked: Collection[str]) -> int:
    """Runs until SIGTERM or Ctrl-C; returns the exit code. Raises ListenError, RunDirError and ConfigError.

    `asked` names the settings that somebody gave: a metrics port that nobody asked for and somebody else has
    is replaced by a free one.
    """
    listeners = listen(settings.frontend.host, settings.frontend.port, settings.launch.frontends)
    with contextlib.ExitStack() as stack:
        stack.callback(_close, listeners)
        folder = stack.enter_context(run_dir(settings.wire.run_dir))
        settings = _placed(settings, folder, asked)
        return asyncio.run(_supervise(settings, listeners, folder))


async def _supervise(settings: Settings, listeners: list[socket.socket], folder: Path) -> int:
    roles = [*_frontends(settings, listeners, folder), _worker(settings)]
    console = Console(sys.stderr, tuple(role.name for role in roles))
    following: list[asyncio.Task[None]] = []

    def on_stop() -> None:
        """No new connections wait in our queues, and nobody asks whether it is ready."""
        _close(listeners)
        following[0].cancel()
        console.done()

    supervisor = Supervisor(
        roles,
        console,
        stop_timeout=settings.launch.stop_timeout,
        gone=lambda pid: _forget_gauges(folder, pid),
        on_stop=on_stop,
    )
    text = welcome(url(listeners[0]), settings.model.name, keys=bool(settings.frontend.api_keys))
    following.append(asyncio.create_task(follow(supervisor, console, reachable(listeners[0]), text)))
    return await supervisor.run()


def _placed(settings: Settings, folder: Path, asked: Collection[str]) -> Settings:
    host, port = settings.worker.worker_host, settings.worker.worker_metrics_port
    values: dict[str, object] = {"run_dir": str(folder)}
    if port and is_taken(host, port):
        if "worker_metrics_port" in asked:
            listen(host, port)  # raises the sentence
        values["worker_metrics_port"] = free = _free_port(host)
        print(f"port {port} is in use: the worker's /metrics is on port {free}", file=sys.stderr)
    return with_values(settings, values)


def _free_port(host: str) -> int:
    with listen(host, 0)[0] as listener:
        return int(listener.getsockname()[1])


def _worker(settings: Settings) -> Role:
    command = _command("worker", settings, WORKER_FLAGS)
    return Role("worker", lambda _: command, lambda n: _environment() | {"SLUICE_EPOCH": str(n)})


def _frontends(settings: Settings, listeners: list[socket.socket], folder: Path) -> list[Role]:
    return [_frontend(i, settings, listener.fileno(), folder) for i, listener in enumerate(listeners)]


def _frontend(index: int, settings: Settings, fd: int, folder: Path) -> Role:
    command = [*_command("frontend", settings, FRONTEND_FLAGS), f"--fd={fd}"]
    metrics = {"PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")}
    return Role(f"frontend {index}", lambda _: command, lambda _: _environment() | metrics, (fd,))


def _close(listeners: Sequence[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def _forget_gauges(folder: Path, pid: int) -> None:
    """A dead frontend's live gauges do not count; its counters and histograms stay, so that none ever falls."""
    for path in (folder / "metrics").glob(f"gauge_live*_{pid}.db"):
        path.unlink(missing_ok=True)


def _verdict(codes: Sequence[int]) -> int:
    """0 when every child ended well; one that had no handler yet and died of our SIGTERM did."""
    return 0 if all(code in (0, -signal.SIGTERM) for code in codes) else 1


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop)
    try:
        yield
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)
