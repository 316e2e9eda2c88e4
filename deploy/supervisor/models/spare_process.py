"""The spare process of a server with many models: imports what every worker needs, then becomes a worker.

The launcher starts it (spare.py) with its own pid and the number of a socket. When a model is to be loaded, it sends
one message: what `python -m` would be given, the environment, and the descriptor for stdout and stderr. If the socket
ends before that, so does the process.
"""

import json
import os
import runpy
import socket
import sys
from importlib import import_module

from deploy.supervisor.models.spare import MOST_BYTES
from deploy.supervisor.parent_death import die_with

# None of these reads an environment variable that the message may change, and none imports prometheus-client, which
# decides when it is imported where metrics are kept.
MODULES = (
    "torch",
    "worker.engine.load_weights",
    "worker.grammar.compiler",
    "worker.model.cpu_decoder",
    "worker.run.runner",
    "worker.schedule.scheduler",
    "worker.transport.server",
)


def main(argv: list[str]) -> int:
    parent, number = map(int, argv)
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
    spin_briefly()  # what the imports set belongs in the new environment, too
    sys.argv = [order["module"], *order["words"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
