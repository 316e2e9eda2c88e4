"""`sluice reload`: tells a server on this machine to replace its frontends without refusing a request."""

import os
import signal

from deploy.supervisor.child_command import CliError
from deploy.supervisor.run_dir import running_servers
from shared.flags import Parser


def parser() -> Parser:
    parser = Parser(prog="sluice reload", description="Replace the frontends of a running server, one after another.")
    parser.add_argument(
        "--run-dir", default="", metavar="TEXT", help="the server's --run-dir, if it has one [SLUICE_RUN_DIR]"
    )
    return parser


def reload(words: list[str]) -> int:
    """Signals the running server to replace its frontends. Raises CliError unless exactly one server runs."""
    folder = parser().read(words).run_dir or os.environ.get("SLUICE_RUN_DIR", "")
    pids = running_servers(folder)
    if not pids:
        raise CliError(f"no server runs in {folder}" if folder else "no server runs here; see --run-dir", 1)
    if len(pids) > 1:
        processes = ", ".join(map(str, pids))
        raise CliError(f"{len(pids)} servers run here; send SIGHUP to one of the processes {processes}", 1)
    os.kill(pids[0], signal.SIGHUP)
    print(f"the server (process {pids[0]}) replaces its frontends; its log shows when each one is replaced")
    return 0
