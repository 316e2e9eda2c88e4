"""A spare process waits with the worker's libraries imported, and becomes the worker of the next model that is loaded.

Imports take one to two seconds, as long as reading a small model. The process knows no settings
until it gets a command, an environment and the pipe for its output through a socket.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import runpy
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from deploy.launcher.child import start_process
from deploy.launcher.child_command import child_environment, die_with

MODULE = "deploy.launcher.many_spare"
PREFIX = [sys.executable, "-P", "-m"]  # the start of commands that a spare process can carry out
ROOM = " " * 4096  # last argument: reserves space in which `ps` can show the worker's command
MOST_BYTES = 128 << 10  # limit on a command with its environment, which must fit into one message


@dataclass(slots=True)
class Spare:
    """Holds at most one spare process. Without a spare process, `start` starts workers as usual.

    most_failures: after this many spare processes have ended by themselves, no more are started; 0: none is started
    """

    most_failures: int = 3
    _process: Process | None = None
    _socket: socket.socket | None = None
    _starting: asyncio.Task[None] | None = None
    _failures: int = 0

    def prepare(self) -> None:
        """Begins to start a spare process if there is none."""
        if self._process is not None and self._process.returncode is not None:
            self._failures += 1
            self._drop()
        if self._process is None and self._starting is None and self._failures < self.most_failures:
            self._starting = asyncio.create_task(self._start())

    async def start(
        self, command: Sequence[str], environment: Mapping[str, str], fds: tuple[int, ...], output: int
    ) -> Process:
        """Makes the spare process carry out a command, or starts a new process as `start_process` does."""
        process, order = self._process, _order(command, environment)
        fits = not fds and 0 < len(order) <= MOST_BYTES
        if process is None or self._socket is None or process.returncode is not None or not fits:
            return await start_process(command, environment, fds, output)
        with self._socket as ours:
            self._process = self._socket = None
            try:
                socket.send_fds(ours, [order], [output])
            except OSError:  # the spare process has just ended
                return await start_process(command, environment, fds, output)
        return process

    async def close(self) -> None:
        """Ends the spare process."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        process = self._process
        self._drop()
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._process = self._socket = None

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        words = [sys.executable, "-P", "-m", MODULE, str(os.getpid()), str(theirs.fileno()), ROOM]
        try:
            with theirs, contextlib.suppress(OSError):
                self._process = await asyncio.create_subprocess_exec(
                    *words, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, pass_fds=(theirs.fileno(),),
                    env=child_environment(), start_new_session=True,
                )  # fmt: skip
                self._socket = ours
        finally:
            self._starting = None
            if self._socket is not ours:
                self._failures += 1
                ours.close()


def _order(command: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """Returns the message to the spare process; empty for a command that it cannot carry out."""
    if [*command[: len(PREFIX)]] != PREFIX:
        return b""
    module, *words = command[len(PREFIX) :]
    return json.dumps({"module": module, "words": words, "environment": {**environment}}).encode()


# The spare process of a server with many models: imports what every worker needs, then becomes a worker.
#
# The launcher starts this process with the launcher's pid and the number of a socket. To load a
# model, the launcher sends one message: the arguments for `python -m`, the environment, and the descriptor for stdout
# and stderr. If the socket is closed before that, this process ends.

# No module here reads an environment variable that the message may change, and none imports prometheus-client, which
# decides at its import where metrics are kept.
MODULES = (
    "torch",
    "worker.engine.load_model",
    "worker.structured_output.compiler",
    "worker.models.cpu_decoder",
    "worker.model_runner.runner",
    "worker.scheduler.scheduler",
    "worker.engine.transport",
)


def show_command(words: Sequence[str]) -> None:
    """Makes `ps` show another command, cut to the length of the command with which this process was started. Linux
    shows the memory in which the arguments were at the start (arg_start to arg_end in proc_pid_stat(5)).
    """
    if sys.platform != "linux":
        return
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # the fields of the line from the third on
    start, end = int(fields[48 - 3]), int(fields[49 - 3])
    if start and end > start:
        text = b"\0".join(map(os.fsencode, words))[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def main(argv: list[str]) -> int:
    parent, number = map(int, argv[:2])
    die_with(parent)
    from worker.ops.openmp import spin_briefly

    spin_briefly()
    for module in MODULES:
        import_module(module)
    with socket.socket(fileno=number) as orders:
        message, fds, _, _ = socket.recv_fds(orders, MOST_BYTES, 1)
    if not message:
        return 0
    (output,) = fds
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    order = json.loads(message)
    os.environ.clear()
    os.environ.update(order["environment"])
    spin_briefly()  # the new environment also needs the variables that the imports set
    sys.argv = [order["module"], *order["words"]]
    show_command([sys.executable, "-P", "-m", *sys.argv])
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
