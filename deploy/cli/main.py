"""The `sluice` command: finds the subcommand, reads its settings, and turns failures into exit codes.

Exit codes: 0 success, 1 a failure, 2 bad flags or settings, 3 this model cannot be served.
"""

import argparse
import difflib
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deploy.cli.config_file import add_config
from deploy.cli.foreign_flags import refuse_foreign
from deploy.launcher.child_command import FRONTEND_FLAGS, SERVE_FLAGS, WORKER_FLAGS, CliError
from shared.build import VERSION
from shared.config.declaration import ConfigError
from shared.config.flags import Flag, Parser, add_flags, misspelt_variables, read, select
from shared.log import is_json_set_up, is_json_wanted, set_up

# The table of `sluice` commands: what each command does and which function runs it.
#
# The table holds the names of functions and imports none, so that help and errors appear at once.


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
    "serve": Command("start workers and frontends, and keep them running", SERVE_FLAGS, "deploy.cli.processes:serve"),
    "worker": Command("start one worker, for frontends started elsewhere", WORKER_FLAGS, "deploy.cli.processes:worker"),
    "frontend": Command(
        "start one frontend, for a worker started elsewhere", FRONTEND_FLAGS, "deploy.cli.processes:frontend"
    ),
    "fetch": Command(
        "download a model, for servers that start later",
        select((), ("model", "revision")),
        "deploy.cli.processes:fetch",
    ),
}
TOOLS = {
    "run": Tool(
        "say whether a model fits this machine, fetch it, serve it, and chat with it", "deploy.cli.run:run",
        "deploy.cli.run:parser",
    ),
    "pull": Tool("fetch the model that a name means", "deploy.cli.pull:pull", "deploy.cli.pull:parser"),
    "tune": Tool(
        "measure a few settings on a model, and write a file for serve --config", "deploy.cli.tune:tune",
        "deploy.cli.tune:parser",
    ),
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
    "batch": Tool(
        "have the lines of a JSONL file answered by a server", "deploy.cli.batch:batch", "deploy.cli.batch:parser"
    ),
    "models": Tool(
        "list the models on this machine and those of a running server, or remove one from the disk",
        "deploy.cli.stored_models:models", "deploy.cli.stored_models:parser",
    ),
    "cache": Tool(
        "list or pin the prefixes that --kv-store keeps, or copy them to other servers",
        "deploy.cli.kv_cache:cache", "deploy.cli.kv_cache:parser",
    ),
    "launch": Tool(
        "configure a coding agent for a running server, and start it", "deploy.cli.launch:launch",
        "deploy.cli.launch:parser",
    ),
    "verify": Tool("check the receipts of an answer", "deploy.cli.verify:verify", "deploy.cli.verify:parser"),
    "replay": Tool(
        "send the requests of a record to a server, and compare the answers", "deploy.cli.replay:run",
        "deploy.cli.replay:parser",
    ),
    "keygen": Tool(
        "make CURVE keys for workers and frontends on different hosts, or a key for receipts",
        "deploy.cli.keygen:keygen",
        "deploy.cli.keygen:parser",
    ),
    "reload": Tool(
        "replace a running server's frontends without refusing a request", "deploy.cli.processes:reload",
        "deploy.cli.processes:parser",
    ),
    "probe": Tool("check the health of a process", "deploy.cli.probe:probe", "deploy.cli.probe:parser"),
    "doctor": Tool(
        "say which kernels will serve and why, and what is missing, with its remedy", "deploy.cli.doctor:doctor",
        "deploy.cli.doctor:parser",
    ),
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


log = logging.getLogger("sluice.cli")
OUR_PACKAGES = ("shared", "frontend", "worker", "deploy", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; `argv` defaults to the process's arguments."""
    _reopen_closed_streams()
    _handle_sigterm_as_init()
    words = list(sys.argv[1:] if argv is None else argv)
    if is_json_wanted(words, os.environ):
        set_up("info", as_json=True)
    name = words[0] if words and words[0] in (*COMMANDS, *TOOLS) else ""
    prog = f"sluice {name}".strip()
    try:
        return _dispatch(prog, name, words)
    except ConfigError as error:
        return _fail(prog, error, 2)
    except CliError as error:
        return _fail(prog, error, error.code)
    except ModuleNotFoundError as error:
        if (package := str(error.name).partition(".")[0]) in OUR_PACKAGES:
            raise
        return _fail(prog, missing_package(package), 3)
    except KeyboardInterrupt:
        return 130


def _reopen_closed_streams() -> None:
    """Reopens closed stdin, stdout and stderr on /dev/null, so that no socket gets a descriptor from 0 to 2."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _handle_sigterm_as_init() -> None:
    """Installs an early SIGTERM handler if this is PID 1 (in a container): else the kernel would ignore the signal."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _dispatch(prog: str, name: str, words: list[str]) -> int:
    if name in TOOLS:
        run = load_function(TOOLS[name].run)
        allow_interrupts()
        return _run_tool(prog, run, words[1:])
    return _command(prog, COMMANDS[name], words[1:]) if name else _top(words)


def _run_tool(prog: str, run: Callable[..., Any], words: list[str]) -> int:
    """Runs a tool. Prints one sentence for an error of the system, even if it comes when buffered output is flushed.

    Letters that the terminal's encoding lacks are written as `?`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        code = int(run(words))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads the output has enough
        code = 128 + signal.SIGPIPE
    except OSError as error:
        code = _fail(prog, f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error, 1)
    _drop_output()
    return code


def _drop_output() -> None:
    """Has what stdout still holds written to nowhere, so that Python does not fail with it again when it exits."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(prog: str, error: object, code: int) -> int:
    """Prints the error in the form that the launcher recognizes (ERROR_LINE in launcher/child.py)."""
    if is_json_set_up():
        log.error("%s: %s", prog, error)
    else:
        print(f"{prog}: {error}", file=sys.stderr)
    return code


def _top(words: list[str]) -> int:
    parser = Parser(prog="sluice", description="Serve open-weight language models over HTTP.")
    parser.add_argument("--version", action="version", version=f"sluice {VERSION}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, entry in (COMMANDS | TOOLS).items():
        commands.add_parser(name, help=entry.about)
    if words and words[0] not in ("-h", "--help", "--version"):
        raise ConfigError(_no_command(words[0]))
    parser.read(words or ["--help"])
    return 0


def _no_command(word: str) -> str:
    if word.startswith("-"):
        return f"{word} must follow a command, as in `sluice serve {word}`; see sluice --help"
    matches = difflib.get_close_matches(word, [*COMMANDS, *TOOLS], n=1)
    return f"there is no command {word!r}; " + (f"did you mean {matches[0]}?" if matches else "see sluice --help")


def _command(prog: str, command: Command, words: list[str]) -> int:
    takes_model = any(flag.name == "model" for flag in command.flags)
    usage = f"{prog} [MODEL] [--flag value ...]" if takes_model else f"{prog} [--flag value ...]"
    parser = Parser(prog=prog, usage=usage, description=command.about.capitalize() + ".")
    add_flags(parser, command.flags)
    for hidden in ("--parent", "--fd"):  # passed by the launcher to its child processes
        parser.add_argument(hidden, type=int, default=-1, help=argparse.SUPPRESS)
    if command.flags is SERVE_FLAGS:
        parser.add_argument(
            "--config", type=Path, metavar="FILE", help="file (TOML) whose keys are these flags' names; flags win"
        )
    parser.add_argument("--heartbeat", default="", help=argparse.SUPPRESS)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    if takes_model:
        parser.add_argument("positional_model", metavar="MODEL", nargs="?", help="the same as --model MODEL")
    refuse_foreign(words)
    namespace = parser.read(words)
    if takes_model and namespace.positional_model is not None:
        if "model" in namespace:
            raise ConfigError(f"{namespace.positional_model!r} and --model both name the model")
        namespace.model = namespace.positional_model
    if getattr(namespace, "config", None) is not None:
        add_config(namespace, namespace.config, command.flags, os.environ)
    for sentence in misspelt_variables(os.environ) if namespace.parent < 0 else ():
        print(f"{prog}: {sentence}", file=sys.stderr)
    return int(load_function(command.run)(read(namespace, os.environ, command.flags), namespace))


# Prepares the start of a command: reports missing packages, and restores Python's handling of Ctrl-C.

# Packages that a worker needs in addition to a frontend's packages (requirements-frontend.txt).
WORKER_PACKAGES = ("torch", "safetensors", "numpy")


def missing_package(name: str) -> str:
    """Returns an error message for a missing package, with the command that installs it."""
    return f"the package {name} is not installed in this Python; run: {sys.executable} -m pip install {name}"


def require_worker_packages() -> None:
    """Raises CliError if packages of a worker are missing. Imports none of them, because torch takes seconds."""
    missing = [name for name in WORKER_PACKAGES if find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        raise CliError(
            f"a worker needs {' and '.join(missing)}, which this Python does not have; run: {sys.executable} -m pip "
            f"install {names}",
            3,
        )


def allow_interrupts() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again. Before this call, Ctrl-C ends the process at once (see sluice.py)."""
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())
