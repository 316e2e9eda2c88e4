"""Keeps all servers started but only one active, so that their figures are measured within the same minutes.

Servers that are not being measured are stopped (SIGSTOP), so that they use no CPU time.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.client.load_client import Target
from bench.client.server import BenchError, free_port
from bench.packages import psutil
from bench.peers.catalog import Peer
from bench.peers.llama_cpp import Command

START_S = 900.0
RESUME_S = 1.0  # time for a server's processes to reconnect after SIGCONT


@dataclass(frozen=True, slots=True)
class PeerServer:
    """One running server, stopped except inside `resumed()`."""

    peer: Peer
    target: Target
    process: psutil.Process

    @contextmanager
    def resumed(self) -> Iterator[Target]:
        _signal(self.process, signal.SIGCONT)
        try:
            time.sleep(RESUME_S)
            wait_until_alive(self.peer, self.target, self.process)
            yield self.target
        finally:
            _signal(self.process, signal.SIGSTOP)


def install(peer: Peer, root: Path, folder: Path) -> None:
    """Installs a peer unless it is already installed; this takes minutes and gigabytes. Raises BenchError."""
    install_once(peer.name, peer.setup(root), root, peer.tools)
    for command in peer.prepare(root, folder):
        _run(peer.name, command, root / peer.tools)


def install_once(name: str, commands: list[Command], root: Path, tools: str = "") -> None:
    """Runs the commands that install something, unless they once ran to their end. Raises BenchError."""
    root.mkdir(parents=True, exist_ok=True)
    done = root / f"{name}.done"
    if not done.exists():
        for command in commands:
            _run(name, command, root / tools)
        done.touch()


@contextmanager
def started_peers(peers: list[Peer], root: Path, folder: Path) -> Iterator[list[PeerServer]]:
    """Starts the servers one after another and pauses each (SIGSTOP) once it serves. Always ends them on exit."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_serving(peer, root, folder)) for peer in peers]


@contextmanager
def launched(peer: Peer, root: Path, folder: Path) -> Iterator[tuple[Target, psutil.Process]]:
    """Starts a server, without waiting for it, and ends it on exit."""
    port = free_port()
    log, environment = root / f"{peer.name}.log", os.environ | dict(peer.environment)
    with log.open("wb") as out:
        popen = subprocess.Popen(
            peer.serve(root, folder, port),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    process = psutil.Process(popen.pid)
    try:
        yield Target(f"http://127.0.0.1:{port}", peer.model(folder), without=peer.without), process
    finally:
        _end(process)
        popen.wait()


def wait_until_alive(peer: Peer, target: Target, process: psutil.Process) -> None:
    """Waits until the server is alive. Raises BenchError if the server ends or does not answer in time; its log says
    why."""
    _wait(target.url + peer.alive, process)


@contextmanager
def _serving(peer: Peer, root: Path, folder: Path) -> Iterator[PeerServer]:
    with launched(peer, root, folder) as (target, process):
        wait_until_alive(peer, target, process)
        _signal(process, signal.SIGSTOP)
        yield PeerServer(peer, target, process)


def _wait(url: str, process: psutil.Process) -> None:
    """Waits until the server answers. Raises BenchError if the server ends or does not answer in time; its log says
    why."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise BenchError(f"the server behind {url} ended; its log beside the environments says why")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise BenchError(f"{url} did not answer with success within {START_S:.0f} s; the server's log may say why")


def process_tree(process: psutil.Process) -> list[psutil.Process]:
    """Returns a process and its descendants; an empty list if the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _signal(process: psutil.Process, signum: int) -> None:
    for process_ in process_tree(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            process_.send_signal(signum)


def _end(process: psutil.Process) -> None:
    processes = process_tree(process)
    for signum in (signal.SIGCONT, signal.SIGTERM):
        for process_ in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process_.send_signal(signum)
    _, left = psutil.wait_procs(processes, timeout=20)
    for process_ in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process_.kill()


def _run(name: str, command: Command, tools: Path) -> None:
    print(f"{name}: {' '.join(command)[:150]}", file=sys.stderr, flush=True)
    try:
        subprocess.run(command, check=True, env=os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"})
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchError(f"{name} could not be installed: {error}") from error
