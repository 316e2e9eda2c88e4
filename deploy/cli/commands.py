"""The table of `sluice` commands: what each command does and which function runs it.

The table holds the names of functions and imports none, so that help and errors appear at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from deploy.supervisor.child_command import FRONTEND_FLAGS, SERVE_FLAGS, WORKER_FLAGS
from shared.flags import Flag, select


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand that takes settings.

    run: "module:name" of a function that takes the settings and the parsed arguments.
    """

    about: str
    flags: tuple[Flag, ...]
    run: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A subcommand with its own arguments.

    run: "module:name" of a function that takes the argument list.
    parser: "module:name" of a function that returns its argument parser.
    """

    about: str
    run: str
    parser: str = ""


COMMANDS = {
    "serve": Command(
        "start workers and frontends, and keep them running", SERVE_FLAGS, "deploy.cli.process_commands:serve"
    ),
    "worker": Command(
        "start one worker, for frontends started elsewhere", WORKER_FLAGS, "deploy.cli.process_commands:worker"
    ),
    "frontend": Command(
        "start one frontend, for a worker started elsewhere", FRONTEND_FLAGS, "deploy.cli.process_commands:frontend"
    ),
    "fetch": Command(
        "download a model, for servers that start later", select((), ("model", "revision")), "deploy.cli.fetch:fetch"
    ),
}
TOOLS = {
    "bench": Tool("measure a running server, its modes, or a GPU", "bench.__main__:main"),
    "simulate": Tool(
        "replay traffic through the scheduler in virtual time",
        "bench.simulate.command:main",
        "bench.simulate.command:parser",
    ),
    "chat": Tool("chat with a running server in the terminal", "deploy.cli.chat:chat", "deploy.cli.chat:chat_parser"),
    "complete": Tool(
        "continue a text with a running server", "deploy.cli.chat:complete", "deploy.cli.chat:complete_parser"
    ),
    "models": Tool("list a running server's models", "deploy.cli.chat:models", "deploy.cli.chat:models_parser"),
    "verify": Tool("check the receipts of an answer", "deploy.cli.verify:verify", "deploy.cli.verify:parser"),
    "replay": Tool(
        "send the requests of a record to a server, and compare the answers", "deploy.replay.command:run",
        "deploy.replay.command:parser",
    ),
    "keygen": Tool(
        "make CURVE keys for workers and frontends on different hosts, or a key for receipts",
        "deploy.cli.keygen:keygen",
        "deploy.cli.keygen:parser",
    ),
    "reload": Tool(
        "replace a running server's frontends without refusing a request", "deploy.cli.reload:reload",
        "deploy.cli.reload:parser",
    ),
    "probe": Tool("check the health of a process", "deploy.cli.probe:probe", "deploy.cli.probe:parser"),
    "env": Tool("describe this machine and installation", "deploy.cli.env_report:env", "deploy.cli.env_report:parser"),
    "completion": Tool(
        "print a completion script for bash or zsh", "deploy.cli.shell_completion:completion",
        "deploy.cli.shell_completion:parser",
    ),
}  # fmt: skip


def load_function(place: str) -> Callable[..., Any]:
    """Imports and returns the function at "module:name"."""
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
