"""The spare process of a server with many models: imports what every worker needs, then becomes a worker.

The launcher starts this process (spare.py) with the launcher's pid and the number of a socket. To load a model, the
launcher sends one message: the arguments for `python -m`, the environment, and the descriptor for stdout and stderr. If
the socket is closed before that, this process ends.
"""

import ctypes
import json
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from deploy.supervisor.models.spare import MOST_BYTES
from deploy.supervisor.parent_death import die_with

# No module here reads an environment variable that the message may change, and none imports prometheus-client, which
# decides at its import where metrics are kept.
MODULES = (
    "torch",
    "worker.engine.load_weights",
    "worker.grammar.compiler",
    "worker.model.cpu_decoder",
    "worker.run.runner",
    "worker.schedule.scheduler",
    "worker.transport.server",
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
    from worker.kernels.cpu.openmp import spin_briefly

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
