"""The launcher behind `sluice serve`: keeps N workers and M frontends running until it is stopped.

The launcher owns what must outlive its children (the run folder, the listening sockets). It sees only its children's
exit codes, log lines, heartbeats (watchdog.py) and /ready. The children die with the launcher, whatever the cause of
its death (child_command.py). SIGHUP replaces the frontends, one after another, without refusing a request.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from deploy.launcher import child_command
from deploy.launcher.child import ChildSpec
from deploy.launcher.child_command import FRONTEND_FLAGS, WORKER_FLAGS, child_environment
from deploy.launcher.console import Console
from deploy.launcher.many_manager import Manager
from deploy.launcher.many_plan import Plan, plan
from deploy.launcher.placement import WorkerPlacement, addresses, place_workers
from deploy.launcher.run_dir import OF_WORKERS, RunDirError, is_taken, listen, reachable, run_dir, url, with_store
from deploy.launcher.supervisor import Supervisor
from deploy.launcher.watchdog import Readiness, Timeouts, Watchdog, poll_ready, ready_message
from shared.config.flags import secret_variables
from shared.config.settings import Settings, with_values
from shared.heartbeat import Heartbeat
from shared.log import NonBlockingStream
from shared.machine import visible_gpus


async def report_readiness(
    supervisor: Supervisor,
    console: Console,
    address: tuple[str, int],
    ready_text: Callable[[str], str],
    *,
    interval: float = 2.0,
    secure: bool = False,
) -> None:
    """Shows the loading progress, prints `ready_text(task)` when the server is ready, then every change of readiness.

    interval: seconds between polls once the server is ready; before, there are five polls a second.
    """
    last = Readiness()
    while True:
        now = await poll_ready(*address, secure=secure) or Readiness()
        if now.ready and not last.ready:
            console.clear_progress()
            console.print("ready again" if supervisor.ready_once else ready_text(now.task))
        elif last.ready and not now.ready:
            console.print(f"not ready: {now.reason}")
        elif not now.ready and not supervisor.ready_once:
            console.progress(now.progress, now.reason)
        if now.ready:
            supervisor.mark_ready()
        last = now
        await asyncio.sleep(interval if now.ready else 0.2)


def serve(settings: Settings, explicit: Collection[str]) -> int:
    """Runs until SIGTERM or Ctrl-C and returns the exit code. Raises ListenError, RunDirError and ConfigError.

    explicit: names of the settings that the user gave. A metrics port in use is replaced by a free one only if the user
    did not give it.
    """
    listeners = listen(settings.frontend.host, settings.frontend.port, settings.launch.frontends)
    with contextlib.ExitStack() as stack:
        stack.callback(_close, listeners)
        folder = stack.enter_context(run_dir(settings.wire.run_dir))
        settings = with_values(settings, {"run_dir": str(folder)})
        if settings.many:
            planned = plan(settings, explicit)
            return asyncio.run(_supervise(planned.for_frontends(), listeners, [], folder, planned))
        settings = stack.enter_context(with_store(settings, explicit))
        workers = place_workers(settings, visible_gpus(), lambda port: _metrics_port(settings, port, explicit))
        return asyncio.run(_supervise(settings, listeners, workers, folder))


async def _supervise(
    settings: Settings,
    listeners: list[socket.socket],
    workers: list[WorkerPlacement],
    folder: Path,
    planned: Plan | None = None,
) -> int:
    specs = [*_frontend_specs(settings, listeners, folder), *(_worker_spec(worker, folder) for worker in workers)]
    with (
        contextlib.closing(NonBlockingStream(sys.stderr)) as stderr,
        contextlib.closing(NonBlockingStream(sys.stdout)) as stdout,
    ):
        console = Console(
            stderr, tuple(spec.name for spec in specs), stdout, as_json=settings.frontend.log_format == "json"
        )
        return await _run_supervisor(console, specs, settings, listeners, folder, planned)


async def _run_supervisor(
    console: Console,
    specs: list[ChildSpec],
    settings: Settings,
    listeners: list[socket.socket],
    folder: Path,
    planned: Plan | None,
) -> int:
    reporting: list[asyncio.Task[None]] = []

    def on_stop() -> None:
        """Closes the sockets, so that no new connections wait in their queues, and ends the readiness report."""
        _close(listeners)
        for task in reporting:
            task.cancel()
        console.clear_progress()

    supervisor = Supervisor(
        specs,
        console,
        stop_timeout=settings.launch.stop_timeout,
        on_stop=on_stop,
        start_timeout=settings.launch.load_timeout,
        ends_process=True,
    )
    secure = bool(settings.frontend.ssl_certfile)
    here, keyed = url(listeners[0], secure=secure), settings.frontend.keyed

    def text(task: str) -> str:
        return ready_message(here, settings.model.name, task, keys=keyed)

    report = report_readiness(supervisor, console, reachable(listeners[0]), text, secure=secure)
    reporting.append(asyncio.create_task(report))
    if planned is not None:
        manager = Manager(planned, supervisor, lambda worker: _worker_spec(worker, folder), console.print)
        reporting.append(manager.start())
    return await supervisor.run()


def _metrics_port(settings: Settings, port: int, explicit: Collection[str]) -> int:
    """Returns `port` for a worker's /metrics, or a free port if `port` is in use and the user did not choose it."""
    host = settings.worker.worker_host
    if not is_taken(host, port):
        return port
    if "worker_metrics_port" in explicit:
        listen(host, port, flags=OF_WORKERS)  # raises the error that the user sees
    free = _free_port(host)
    print(f"port {port} is in use; the worker's /metrics is on port {free} instead", file=sys.stderr)
    return free


def _free_port(host: str) -> int:
    with listen(host, 0)[0] as listener:
        return int(listener.getsockname()[1])


def watchdog_for(settings: Settings, folder: Path, name: str) -> Watchdog:
    """Makes the heartbeat file `name` in the run folder, and a watchdog that reads it. Raises RunDirError."""
    try:
        heartbeat = Heartbeat(folder / name)
    except OSError as error:
        raise RunDirError(f"cannot write to --run-dir {folder}: {error.strerror}") from error
    return Watchdog(heartbeat, Timeouts(settings.frontend.stall_timeout, settings.launch.load_timeout))


def _worker_spec(worker: WorkerPlacement, folder: Path) -> ChildSpec:
    watchdog = watchdog_for(worker.settings, folder, worker.heartbeat)
    argv = [
        *child_command.command_line("worker", worker.settings, WORKER_FLAGS),
        f"--heartbeat={watchdog.heartbeat.file}",
    ]
    # Each worker has its own metrics folder, because all workers use the same metric names.
    metrics = folder / "metrics" / worker.heartbeat.removesuffix(".heartbeat")
    metrics.mkdir(parents=True, exist_ok=True)
    variables = {"PROMETHEUS_MULTIPROC_DIR": str(metrics)} | worker.environment
    return ChildSpec(
        worker.name,
        lambda _: argv,
        lambda n: child_environment() | variables | {"SLUICE_EPOCH": str(n)},
        watchdog=watchdog,
    )


def _frontend_specs(settings: Settings, listeners: list[socket.socket], folder: Path) -> list[ChildSpec]:
    settings = with_values(settings, {"worker_addresses": addresses(settings)})
    return [_frontend_spec(i, settings, listener.fileno(), folder) for i, listener in enumerate(listeners)]


def _frontend_spec(index: int, settings: Settings, fd: int, folder: Path, generation: int = 0) -> ChildSpec:
    """Returns the spec of the frontend on one socket; `generation` counts the replacements of this frontend.

    The first process of a replacement accepts no connection before it can serve (`--hold`).
    """
    watchdog = watchdog_for(settings, folder, f"frontend-{index}-{generation % 2}.heartbeat")
    argv = [
        *child_command.command_line("frontend", settings, FRONTEND_FLAGS),
        f"--fd={fd}",
        f"--heartbeat={watchdog.heartbeat.file}",
    ]
    variables = {"PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")} | secret_variables(settings, FRONTEND_FLAGS)
    return ChildSpec(
        f"frontend {index}",
        lambda n: [*argv, *["--hold"] * (generation > 0 and n == 1)],
        lambda _: child_environment() | variables,
        (fd,),
        watchdog,
        lambda: _frontend_spec(index, settings, fd, folder, generation + 1),
    )


def _close(listeners: Sequence[socket.socket]) -> None:
    for listener in listeners:
        listener.close()
