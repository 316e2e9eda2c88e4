"""The supervisor behind `sluice serve`: N workers and M frontends, kept alive until told to stop.

Holds what must outlive its children (the run folder, the listening sockets) and knows nothing of what they
compute: it sees exit codes, log lines, signs of life (guard.py) and /ready. Children die with it, however it dies
(tether.py). SIGHUP replaces the frontends, one after another, without a request being refused.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from deploy.supervisor.child_command import FRONTEND_FLAGS, WORKER_FLAGS
from deploy.supervisor.child_command import command as _command
from deploy.supervisor.child_command import environment as _environment
from deploy.supervisor.child_process import ChildSpec
from deploy.supervisor.console import Console
from deploy.supervisor.listen_sockets import is_taken, listen, reachable, url
from deploy.supervisor.placement import WorkerPlacement, addresses, place_workers
from deploy.supervisor.readiness import Readiness, poll_ready, ready_message
from deploy.supervisor.run_dir import RunDirError, run_dir
from deploy.supervisor.supervisor import Supervisor
from deploy.supervisor.watchdog import Timeouts, Watchdog
from shared.config import Settings, with_values
from shared.heartbeat import Heartbeat
from shared.line_writer import NonBlockingStream
from shared.machine import visible_gpus


async def follow(
    supervisor: Supervisor,
    console: Console,
    address: tuple[str, int],
    text: str,
    *,
    calm: float = 2.0,
    secure: bool = False,
) -> None:
    """Shows loading, prints `text` once the server is ready, and afterwards every change of mind.

    Asks five times a second until it is ready, then every `calm` seconds.
    """
    before = Readiness()
    while True:
        health = await poll_ready(*address, secure=secure) or Readiness()
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
        settings = with_values(settings, {"run_dir": str(folder)})
        workers = place_workers(settings, visible_gpus(), lambda port: _metrics_port(settings, port, asked))
        return asyncio.run(_supervise(settings, listeners, workers, folder))


async def _supervise(
    settings: Settings, listeners: list[socket.socket], workers: list[WorkerPlacement], folder: Path
) -> int:
    roles = [*_frontends(settings, listeners, folder), *(_worker(place, folder) for place in workers)]
    with (
        contextlib.closing(NonBlockingStream(sys.stderr)) as people,
        contextlib.closing(NonBlockingStream(sys.stdout)) as machines,
    ):
        console = Console(people, tuple(role.name for role in roles), machines)
        return await _supervise_over(console, roles, settings, listeners, folder)


async def _supervise_over(
    console: Console, roles: list[ChildSpec], settings: Settings, listeners: list[socket.socket], folder: Path
) -> int:
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
        on_stop=on_stop,
        start_timeout=settings.launch.load_timeout,
    )
    secure = bool(settings.frontend.ssl_certfile)
    text = ready_message(url(listeners[0], secure=secure), settings.model.name, keys=bool(settings.frontend.api_keys))
    watching = follow(supervisor, console, reachable(listeners[0]), text, secure=secure)
    following.append(asyncio.create_task(watching))
    return await supervisor.run()


def _metrics_port(settings: Settings, port: int, asked: Collection[str]) -> int:
    """This one for a worker's /metrics, or a free one if it is taken and nobody asked for it."""
    host = settings.worker.worker_host
    if not is_taken(host, port):
        return port
    if "worker_metrics_port" in asked:
        listen(host, port)  # raises the sentence
    free = _free_port(host)
    print(f"port {port} is in use: the worker's /metrics is on port {free}", file=sys.stderr)
    return free


def _free_port(host: str) -> int:
    with listen(host, 0)[0] as listener:
        return int(listener.getsockname()[1])


def watchdog_for(settings: Settings, folder: Path, name: str) -> Watchdog:
    """For the child whose `--heartbeat` is the file `name` in the run folder `folder`. Raises RunDirError."""
    try:
        heartbeat = Heartbeat(folder / name)
    except OSError as error:
        raise RunDirError(f"cannot write to --run-dir {folder}: {error.strerror}") from error
    return Watchdog(heartbeat, Timeouts(settings.frontend.stall_timeout, settings.launch.load_timeout))


def _worker(place: WorkerPlacement, folder: Path) -> ChildSpec:
    watch = watchdog_for(place.settings, folder, place.heartbeat)
    command = [*_command("worker", place.settings, WORKER_FLAGS), f"--heartbeat={watch.heartbeat.file}"]
    metrics = (
        folder / "metrics" / place.heartbeat.removesuffix(".heartbeat")
    )  # apart from others', which count the same things
    metrics.mkdir(parents=True, exist_ok=True)
    own = {"PROMETHEUS_MULTIPROC_DIR": str(metrics)} | place.environment
    return ChildSpec(
        place.name, lambda _: command, lambda n: _environment() | own | {"SLUICE_EPOCH": str(n)}, watch=watch
    )


def _frontends(settings: Settings, listeners: list[socket.socket], folder: Path) -> list[ChildSpec]:
    told = with_values(settings, {"worker_addresses": addresses(settings)})
    return [_frontend(i, told, listener.fileno(), folder) for i, listener in enumerate(listeners)]


def _frontend(index: int, settings: Settings, fd: int, folder: Path, generation: int = 0) -> ChildSpec:
    """A successor accepts nobody before it can serve; from its second life on it is a frontend like others."""
    watch = watchdog_for(settings, folder, f"frontend-{index}-{generation % 2}.heartbeat")
    command = [*_command("frontend", settings, FRONTEND_FLAGS), f"--fd={fd}", f"--heartbeat={watch.heartbeat.file}"]
    metrics = {"PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")}
    return ChildSpec(
        f"frontend {index}",
        lambda n: [*command, *["--hold"] * (generation > 0 and n == 1)],
        lambda _: _environment() | metrics,
        (fd,),
        watch,
        lambda: _frontend(index, settings, fd, folder, generation + 1),
    )


def _close(listeners: Sequence[socket.socket]) -> None:
    for listener in listeners:
        listener.close()
