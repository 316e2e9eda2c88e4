"""`sluice reload`: asks a server on this machine to replace its frontends, without a request being refused."""

import os
import signal

from deploy.supervisor.child_command import CliError
from deploy.supervisor.run_dir import running_servers
from shared.flags import Parser


def parser() -> Parser:
    made = Parser(prog="sluice reload", description="Replaces the frontends of a running server, one after another.")
    made.add_argument(
        "--run-dir", default="", metavar="TEXT", help="the server's, if it was given one [SLUICE_RUN_DIR]"
    )
    return made


def reload(words: list[str]) -> int:
    """Raises Failure unless there is exactly one server."""
    folder = parser().read(words).run_dir or os.environ.get("SLUICE_RUN_DIR", "")
    found = running_servers(folder)
    if not found:
        raise CliError(f"no server runs in {folder}" if folder else "no server runs here; see --run-dir", 1)
    if len(found) > 1:
        processes = ", ".join(map(str, found))
        raise CliError(f"{len(found)} servers run here; send SIGHUP to one of the processes {processes}", 1)
    os.kill(found[0], signal.SIGHUP)
    print(f"the server (process {found[0]}) replaces its frontends; its log says when each is done")
    return 0
