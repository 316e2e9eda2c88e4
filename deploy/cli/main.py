"""The `sluice` command: finds the subcommand, reads its settings, and turns failures into exit codes.

Exit codes: 0 success, 1 a failure, 2 bad flags or settings, 3 this model cannot be served.
"""

import argparse
import difflib
import logging
import os
import signal
import sys
from collections.abc import Sequence

from deploy.cli.commands import COMMANDS, TOOLS, Command, load_function
from deploy.cli.foreign_flags import refuse_foreign
from deploy.cli.installation import allow_interrupts, missing_package
from deploy.supervisor.child_command import CliError
from shared.build import VERSION
from shared.config import ConfigError
from shared.flags import Parser, add_flags, misspelt_variables, read
from shared.logs.log_lines import is_json_set_up, is_json_wanted, set_up

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
        return int(run(words[1:]))
    return _command(prog, COMMANDS[name], words[1:]) if name else _top(words)


def _fail(prog: str, error: object, code: int) -> int:
    """Prints the error in the form that the launcher recognizes (ERROR_LINE in supervisor/child_process.py)."""
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
    for sentence in misspelt_variables(os.environ) if namespace.parent < 0 else ():
        print(f"{prog}: {sentence}", file=sys.stderr)
    return int(load_function(command.run)(read(namespace, os.environ, command.flags), namespace))


if __name__ == "__main__":
    sys.exit(main())
