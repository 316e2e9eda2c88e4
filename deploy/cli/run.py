"""`sluice run NAME`: from a name to an answer. Judges whether the model fits, fetches it, serves it, and chats with it.

The server is a child in a session of its own, so that Ctrl-C stops an answer and not the server; it dies with this
process. With --serve, this process becomes the server.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from deploy.cli.chat import chat
from deploy.cli.machine_speed import measured_speed
from deploy.cli.main import main, require_worker_packages
from deploy.cli.stored_models import size_text
from deploy.cli.verdict import Judge, Verdict
from deploy.launcher.child_command import SERVE_FLAGS, CliError, child_environment, with_local_model
from deploy.launcher.console import Console, Sink
from deploy.launcher.many_sizes import HubModels
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, add_flags, all_flags, read, secret_variables, to_argv
from shared.config.settings import Settings, with_values
from shared.gguf.index import stored_bytes
from shared.gguf.naming import HUB_NAME, GgufError
from shared.gguf.translated import fetch_model
from shared.hf_hub import CHECKPOINT_FILES, HubError, fetch
from shared.machine import available_bytes, visible_gpus
from shared.weight_formats import folder_problem

READY = re.compile(r" is ready at (\S+)")
END_S = 30.0  # how long the server may take to end; then it is killed
WORDS_AFTER_FAILURE = 12  # lines of the server's log that are shown if it does not start
OWN = ("name", "serve", "dry_run", "anyway", "list", "system")
FLAGS = tuple(flag for flag in SERVE_FLAGS if flag.name != "model")


def parser() -> Parser:
    parser = Parser(
        prog="sluice run",
        usage="sluice run NAME [--serve] [--dry-run] [--flag of sluice serve ...]",
        description="Say whether a model fits this machine, how long its context and how fast it will be; fetch it, "
        "serve it, and chat with it.",
    )
    parser.add_argument(
        "name", metavar="NAME", nargs="?",
        help="a short name such as qwen3:4b (--list shows them), a hub id, org/repository:Q4_K_M, or a path",
    )  # fmt: skip
    parser.add_argument("--serve", action="store_true", help="serve the model instead of chatting with it")
    parser.add_argument("--dry-run", action="store_true", help="only say whether the model fits; fetch no weights")
    parser.add_argument("--anyway", action="store_true", help="go on even if the model does not seem to fit")
    parser.add_argument("--list", action="store_true", help="list the short names, and where your own belong")
    parser.add_argument("--system", metavar="TEXT", default="", help="system prompt of the chat")
    add_flags(parser, FLAGS)
    return parser


def run(words: list[str]) -> int:
    """Runs the command and returns its exit code. Raises CliError, and ConfigError for wrong flags."""
    args = parser().read(words)
    if args.list:
        return _list()
    if args.name is None:
        raise ConfigError("the name of a model is missing; `sluice run --list` shows the short ones")
    if args.serve and args.system:
        raise ConfigError("--system is for the chat, which --serve leaves out")
    named = find(args.name)
    own, of_name = vars(_only_settings(args)), vars(_only_settings(parser().read(named.flags)))
    settings = read(argparse.Namespace(**of_name | own), {}, FLAGS)
    require_worker_packages()
    model = named.model
    if HubModels(settings.model.revision).is_away(model):
        verdict = _judge(settings).hub(model)
        model = verdict.offer.model
        _show(args.name, verdict)
        _check(verdict, args)
        if args.dry_run:
            return 0
        fetch_showing(model, settings, verdict, sys.stderr)
    else:
        verdict = judge_local(model, settings, timed=args.dry_run)
        _show(args.name, verdict)
        _check(verdict, args)
        if args.dry_run:
            return 0
    flags = [f"--model={model}", *to_argv(settings, FLAGS)]
    os.environ |= secret_variables(settings, FLAGS)
    if args.serve:
        return main(["serve", *flags])
    with served(flags, sys.stderr) as url:
        return chat(["--url", url, *(["--system", args.system] if args.system else [])])


def _list() -> int:
    known = names()
    width = max(map(len, known))
    for name, named in known.items():
        print(f"{name:<{width}}  {' '.join((named.model, *named.flags))}")
    print(f"\nmore names: {own_file()}, with lines such as")
    print('[names]\n"mine:8b" = { repository = "org/name-GGUF", choose = "Q4_K_M", flags = { max-seq-len = 8192 } }')
    return 0


def _only_settings(args: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**{name: value for name, value in vars(args).items() if name not in OWN})


def _judge(settings: Settings) -> Judge:
    """Returns a judge with what is known of this machine. Nothing is known of a GPU's speed."""
    on_gpu = bool(visible_gpus())
    speed = lambda: None if on_gpu else measured_speed()  # noqa: E731
    return Judge(speed, available_bytes(), settings.model.revision, settings.model.mmproj, tries=not on_gpu)


def judge_local(model: str, settings: Settings, *, timed: bool) -> Verdict:
    """Judges a model on this machine; smollm2 is fetched for that if need be. Raises CliError."""
    folder = Path(with_local_model(with_values(settings, {"model": model})).model.model)
    if problem := folder_problem(folder):
        raise CliError(f"{model}: {problem}", 3)
    return _judge(settings).local(model, folder, stored_bytes(folder), timed=timed)


def _show(name: str, verdict: Verdict) -> None:
    means = "" if verdict.offer.model == name else f" is {verdict.offer.model}"
    print("\n".join([f"{name}{means}", *verdict.lines()]), file=sys.stderr, flush=True)


def _check(verdict: Verdict, args: argparse.Namespace) -> None:
    if verdict.problem and not args.anyway:
        raise CliError(f"{verdict.problem} (--anyway goes on)", 3)


def fetch_showing(model: str, settings: Settings, verdict: Verdict, stream: Sink) -> None:
    """Downloads what the cache lacks of a model on the hub, with a progress bar, and checks its hashes.

    A download that was cut off continues. Raises CliError.
    """
    bar = DownloadBar(model, stream)
    try:
        if HUB_NAME.fullmatch(model):
            fetch_model(model, settings.model.revision, mmproj=settings.model.mmproj, on_progress=bar)
        else:
            fetch(model, CHECKPOINT_FILES, revision=settings.model.revision, on_progress=bar)
    except (HubError, GgufError) as error:
        bar.end()
        hint = "; the next try continues the download" if verdict.offer.fetch and bar.done else ""
        raise CliError(f"{error}{hint}", 3) from error
    bar.end()


class DownloadBar:
    """Shows the progress of a download: on a terminal a bar with rate and time left, elsewhere a line every 10 %."""

    def __init__(self, model: str, stream: Sink) -> None:
        self.done = 0
        self._model = model
        self._console = Console(stream)
        self._terminal = stream.isatty()
        self._began: tuple[float, int] | None = None
        self._lock = threading.Lock()  # several files are fetched at a time, each in a thread

    def __call__(self, done: int, total: int) -> None:
        with self._lock:
            now = time.monotonic()
            if self._began is None:
                self._began = now, done
            self.done = done
            self._console.progress(done / max(total, 1), f"fetching {self._model}{self._rate(now, done, total)}")

    def _rate(self, now: float, done: int, total: int) -> str:
        if not self._terminal or self._began is None or now - self._began[0] < 0.5:
            return ""
        rate = (done - self._began[1]) / (now - self._began[0])
        left = f", {(total - done) / rate:.0f} s left" if rate > 0 else ""
        return f": {size_text(done)} of {size_text(total)}, {size_text(rate)}/s{left}"

    def end(self) -> None:
        self._console.clear_progress()


@contextmanager
def served(flags: Sequence[str], stream: Sink, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Starts a server of these flags on this machine, and yields its URL when it is ready; ends it afterwards.

    Its output is not shown, but for the progress of loading. Raises CliError, with the end of the output, if the server
    does not start.
    """
    given = {flag.partition("=")[0] for flag in flags}
    more = [flag for flag in ("--host=127.0.0.1", "--port=0") if flag.partition("=")[0] not in given]
    command = [sys.executable, "-P", "-m", "deploy.cli.main", "serve", f"--parent={os.getpid()}", *flags, *more]
    environment = {**environment, "PYTHONPATH": child_environment()["PYTHONPATH"], "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    log = process.stderr
    assert log is not None
    drain = threading.Thread(target=_drain, args=(log,), daemon=True)
    try:
        url = _wait(process, log, Console(stream))
        drain.start()
        yield url
    finally:
        _stop(process)
        if drain.ident is not None:
            drain.join(END_S)
        log.close()


def _wait(process: "subprocess.Popen[str]", log: Iterator[str], console: Console) -> str:
    lines: list[str] = []
    for line in log:
        if found := READY.search(line):
            console.clear_progress()
            return found[1]
        if line.strip():
            lines.append(line.rstrip())
        if progress := re.fullmatch(r"([^|]+): (\d+) %\n", line):
            console.progress(int(progress[2]) / 100, progress[1])
    console.clear_progress()
    code = process.wait()
    raise CliError("the server did not start:\n" + "\n".join(lines[-WORDS_AFTER_FAILURE:]), code if code > 0 else 1)


def _drain(log: Iterator[str]) -> None:
    with contextlib.suppress(ValueError, OSError):
        for _ in log:
            pass


def _stop(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# Short names of models, such as qwen3:4b: the table in model_names.toml, and the user's own file beside it.

TABLE = Path(__file__).with_name("model_names.toml")
FIELDS = ("repository", "choose", "flags")
RESERVED = {"model"}  # the name itself says this


@dataclass(frozen=True, slots=True)
class NamedModel:
    """What a name means.

    model: for --model, or a hub repository with GGUF files of which one has to be chosen
    flags: flags of `sluice serve` that this model needs, as words of a command line
    """

    model: str
    flags: tuple[str, ...] = ()


def own_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the path of the user's file of names, which need not exist."""
    base = environment.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "sluice" / "models.toml"


def names() -> dict[str, NamedModel]:
    """Returns all names; those of the user's file win. Raises CliError that names the file and the entry at fault."""
    own = own_file()
    return read_names(TABLE) | (read_names(own) if own.is_file() else {})


def read_names(file: Path) -> dict[str, NamedModel]:
    """Reads one file of names. Raises CliError."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8")).get("names", {})
    except (OSError, ValueError) as error:
        raise CliError(f"{file} cannot be read: {error}", 2) from error
    if not isinstance(table, dict):
        raise CliError(f"{file}: names must be a table", 2)
    return {name.casefold(): _entry(f"{file}: {name!r}", value) for name, value in table.items()}


def find(name: str) -> NamedModel:
    """Returns what a name means. A path, a hub id or a name that `sluice serve` knows means itself.

    Raises CliError with the nearest name, for a word that is none of these.
    """
    known = names()
    if (found := known.get(name.casefold())) is not None:
        return found
    if "/" in name or name in ("demo", ".", "..") or Path(name).expanduser().exists():
        return NamedModel(name)
    sizes = [other for other in known if other.partition(":")[0] == name.casefold()]
    close = sizes or get_close_matches(name.casefold(), known, n=3)
    hint = f"did you mean {', '.join(close)}?" if close else "`sluice run --list` shows the names."
    raise CliError(f"{name}: no such name, file or folder; {hint} A hub id has the form org/repository", 2)


def _entry(place: str, value: Any) -> NamedModel:
    if not isinstance(value, dict) or not isinstance(value.get("repository"), str):
        raise CliError(f"{place} needs a repository, as in {{ repository = 'org/name' }}", 2)
    if unknown := sorted(value.keys() - set(FIELDS)):
        raise CliError(f"{place}: {unknown[0]!r} is none of {', '.join(FIELDS)}", 2)
    choose, flags = value.get("choose", ""), value.get("flags", {})
    if not isinstance(choose, str) or not isinstance(flags, dict):
        raise CliError(f"{place}: choose must be a text, and flags a table", 2)
    known = {flag.option.removeprefix("--") for flag in all_flags()} - RESERVED
    for flag in flags:
        if flag not in known:
            raise CliError(f"{place}: flags: --{flag} is no flag of sluice serve", 2)
    words = tuple(_word(flag, setting) for flag, setting in flags.items())
    return NamedModel(f"{value['repository']}:{choose}" if choose else value["repository"], words)


def _word(flag: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"
