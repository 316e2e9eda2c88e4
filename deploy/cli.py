"""The command `sluice`: which flags each subcommand has, and what it calls.

Imports what a subcommand needs only when it runs, so that help and mistakes are answered at once. Exit codes:
0 well, 1 something failed, 2 bad flags or settings, 3 this model cannot be served.
"""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.roles import FRONTEND_FLAGS, SERVE_FLAGS, WORKER_FLAGS, Failure, localised, with_text_files
from shared.config import ConfigError, Settings
from shared.flags import Flag, Parser, add_flags, given, misspelt, read

if TYPE_CHECKING:
    from socket import socket

    from shared.pulse import Pulse


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand that takes settings."""

    about: str
    flags: tuple[Flag, ...]
    run: Callable[[Settings, argparse.Namespace], int]


@dataclass(frozen=True, slots=True)
class Tool:
    """A subcommand that reads its own words."""

    about: str
    run: Callable[[list[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns its exit code."""
    _fill_streams()
    _heed_sigterm()
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words and words[0] in (*COMMANDS, *TOOLS) else ""
    prog = f"sluice {name}".strip()
    try:
        return _dispatch(prog, name, words)
    except ConfigError as error:
        return _say(prog, error, 2)
    except Failure as error:
        return _say(prog, error, error.code)
    except KeyboardInterrupt:
        return 130


def _fill_streams() -> None:
    """Where we were started without some of them: else a socket would get such a number, and a child lose it."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _heed_sigterm() -> None:
    """As the first process of a container: to it the kernel gives no signal that nobody handles, as yet."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _dispatch(prog: str, name: str, words: list[str]) -> int:
    if name in TOOLS:
        return TOOLS[name].run(words[1:])
    return _command(prog, COMMANDS[name], words[1:]) if name else _top(words)


def _say(prog: str, error: Exception, code: int) -> int:
    print(f"{prog}: {error}", file=sys.stderr)
    return code


def _top(words: list[str]) -> int:
    parser = Parser(prog="sluice", description="Serves open-weight language models over HTTP.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.about)
    for name, tool in TOOLS.items():
        commands.add_parser(name, help=tool.about)
    parser.read(words or ["--help"])
    return 0


def _version() -> str:
    try:
        return f"sluice {metadata.version('sluice')}"
    except metadata.PackageNotFoundError:
        return "sluice, not installed"


def _command(prog: str, command: Command, words: list[str]) -> int:
    parser = Parser(prog=prog, usage=f"{prog} [--flag value ...]", description=command.about + ".")
    add_flags(parser, command.flags)
    for hidden in ("--parent", "--fd"):  # between the launcher and its children
        parser.add_argument(hidden, type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--pulse", default="", help=argparse.SUPPRESS)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    namespace = parser.read(words)
    for sentence in misspelt(os.environ) if namespace.parent < 0 else ():
        print(f"{prog}: {sentence}", file=sys.stderr)
    return command.run(read(namespace, os.environ, command.flags), namespace)


def _serve(settings: Settings, namespace: argparse.Namespace) -> int:
    from deploy.launch import serve
    from deploy.listen import ListenError
    from deploy.rundir import RunDirError

    try:
        return serve(localised(settings), given(namespace, os.environ, SERVE_FLAGS).keys())
    except (ListenError, RunDirError) as error:
        raise Failure(error, 1) from error


def _worker(settings: Settings, namespace: argparse.Namespace) -> int:
    settings = _begin(settings, namespace)
    from worker.openmp import spin_briefly

    spin_briefly()
    _share_metrics(namespace)
    from worker.__main__ import run
    from worker.model.checkpoint import CheckpointError
    from worker.model.families import UnsupportedModel
    from worker.run.runner import DeviceBroken

    try:
        epoch = os.environ.get("SLUICE_EPOCH", "")  # which life this is, where somebody counts them
        run(settings, int(epoch or time.time()), _pulse(namespace), again=epoch not in ("", "1"))
    except (CheckpointError, UnsupportedModel) as error:
        raise Failure(error, 3) from error
    except DeviceBroken as error:
        raise Failure(error, 1) from error
    return 0


def _frontend(settings: Settings, namespace: argparse.Namespace) -> int:
    settings = with_text_files(_begin(settings, namespace))
    _share_metrics(namespace)
    from frontend.__main__ import serve
    from frontend.checkpoint import TokenizerError

    try:
        serve(settings, [_listener(settings, namespace.fd)], pulse=_pulse(namespace), hold=namespace.hold)
    except TokenizerError as error:
        raise Failure(error, 3) from error
    return 0


def _share_metrics(namespace: argparse.Namespace) -> None:
    """Before anything is counted. A process goes on where the last one in its place was: files do not pile up."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        return
    from deploy.rundir import reserve_metrics

    name = Path(namespace.pulse).stem or str(os.getpid())
    if reserve_metrics(Path(folder), name):
        from prometheus_client import values

        values.ValueClass = values.MultiProcessValue(lambda: name)  # type: ignore[no-untyped-call]
    else:
        del os.environ["PROMETHEUS_MULTIPROC_DIR"]
        logging.warning("no room in %s: what this process counts is not kept for others", folder)


def _begin(settings: Settings, namespace: argparse.Namespace) -> Settings:
    """What both halves do first."""
    if namespace.parent > 0:
        from deploy.tether import tie_to

        tie_to(namespace.parent)
    wire, several = settings.wire, settings.frontend.worker_addresses or settings.frontend.workers_file
    if not wire.run_dir and not (wire.request_address and wire.event_address) and not several:
        raise ConfigError(
            "worker and frontend meet in --run-dir, or at --request-address and --event-address "
            "(a frontend also at --worker-addresses or --workers-file)"
        )
    logging.basicConfig(
        level=settings.frontend.log_level.upper(),
        format="%(asctime)s %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
    )
    return localised(settings)


def _pulse(namespace: argparse.Namespace) -> "Pulse":
    from shared.pulse import Pulse

    return Pulse(Path(namespace.pulse) if namespace.pulse else None)


def _listener(settings: Settings, fd: int) -> "socket":
    import socket

    from deploy.listen import ListenError, listen

    if fd >= 0:
        return socket.socket(fileno=fd)
    try:
        return listen(settings.frontend.host, settings.frontend.port)[0]
    except ListenError as error:
        raise Failure(error, 1) from error


def _bench(words: list[str]) -> int:
    from bench.__main__ import main as bench

    return int(bench(words) or 0)


def _simulate(words: list[str]) -> int:
    """Lends the simulator, which knows no benchmarks, their workloads and their table."""
    from bench.client import Record
    from bench.summary import summarize, table
    from bench.workloads import WORKLOADS, Scale, Workload
    from worker.simulate.command import Lent
    from worker.simulate.command import main as simulate
    from worker.simulate.model import Request
    from worker.simulate.traffic import VOCAB, Traffic

    def maker(workload: Workload) -> Callable[[float, float], Traffic]:
        return lambda rate, length: Traffic.of(workload.make(VOCAB, Scale(rate, length)), workload.sequential)

    def record(request: Request) -> Record:
        return Record(
            sent=request.sent,
            stamps=request.stamps,
            done=request.done,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=len(request.stamps),
            cached_tokens=request.cached_tokens,
            error=request.refused,
        )

    def summary(requests: Sequence[Request]) -> dict[str, float]:
        return summarize([record(request) for request in requests])

    makers = {name: maker(workload) for name, workload in WORKLOADS.items()}
    return simulate(words, Lent(makers, summary, table, localised))


def _chat(words: list[str]) -> int:
    from deploy.talk import chat

    return chat(words)


def _complete(words: list[str]) -> int:
    from deploy.talk import complete

    return complete(words)


def _env(words: list[str]) -> int:
    from deploy.environment import env

    return env(words)


def _keygen(words: list[str]) -> int:
    from deploy.keygen import keygen

    return keygen(words)


def _reload(words: list[str]) -> int:
    from deploy.reload import reload

    return reload(words)


def _probe(words: list[str]) -> int:
    from deploy.probe import probe

    return probe(words)


def _completion(words: list[str]) -> int:
    """Lends the scripts' writer the flags of every command that says them."""
    from deploy.completion import SHELLS, Offer, script, words_of
    from deploy.environment import parser as env_parser
    from deploy.keygen import parser as keygen_parser
    from deploy.probe import parser as probe_parser
    from deploy.reload import parser as reload_parser
    from deploy.talk import chat_parser, complete_parser

    parser = Parser(prog="sluice completion", description="Prints a script: source <(sluice completion bash)")
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.read(words).shell
    spoken = {
        "chat": chat_parser(),
        "complete": complete_parser(),
        "env": env_parser(),
        "probe": probe_parser(),
        "reload": reload_parser(),
        "keygen": keygen_parser(),
        "completion": parser,
    }
    for name, command in COMMANDS.items():
        spoken[name] = Parser(prog=name)
        add_flags(spoken[name], command.flags)
    known: dict[str, Command | Tool] = {**COMMANDS, **TOOLS}
    print(script(shell, {
        name: Offer(entry.about, words_of(spoken[name]) if name in spoken else ()) for name, entry in known.items()
    }))  # fmt: skip
    return 0


COMMANDS = {
    "serve": Command("start a worker and its frontends, and keep them running", SERVE_FLAGS, _serve),
    "worker": Command("start one worker, for frontends started elsewhere", WORKER_FLAGS, _worker),
    "frontend": Command("start one frontend, for a worker started elsewhere", FRONTEND_FLAGS, _frontend),
}
TOOLS = {
    "bench": Tool("measure a running server, its modes, or a GPU", _bench),
    "simulate": Tool("replay traffic through the scheduler in virtual time", _simulate),
    "chat": Tool("talk to a running server at the terminal", _chat),
    "complete": Tool("continue a text with a running server", _complete),
    "keygen": Tool("make keys for worker and frontends on different hosts", _keygen),
    "reload": Tool("replace a running server's frontends without refusing a request", _reload),
    "probe": Tool("ask whether a process is well, for health checks", _probe),
    "env": Tool("say what this machine and installation are", _env),
    "completion": Tool("print a script that completes these words in bash or zsh", _completion),
}

if __name__ == "__main__":
    sys.exit(main())
