"""`sluice tune --model X`: measures a few settings on the model itself, and writes those that help into a file.

One kind of setting after another is tried, beside the best so far. Each measurement is of a fresh server, which serves
nothing else. The candidates take turns, round by round, so that what slows the machine for a while slows all of them.
A setting is taken only if it is better in every round, and in the median by MARGIN and by more than the noise: by how
much measurements of the same settings differ between rounds. Else the usual value stays.
"""

import argparse
import errno
import io
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from deploy.cli.config_file import Value, config_text
from deploy.cli.http_client import Server
from deploy.cli.machine_speed import is_busy, processor
from deploy.cli.main import require_worker_packages
from deploy.cli.run import judge_local, served
from deploy.cli.stored_models import size_text
from deploy.cli.verdict import Forecast
from deploy.launcher.child_command import SERVE_FLAGS, CliError
from deploy.launcher.console import Sink
from deploy.launcher.many_sizes import HubModels
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, add_flags, given_values, new_file, positive_int, read, to_argv, without_settings
from shared.config.settings import Settings, with_values
from shared.machine import usable_cores, visible_gpus

MARGIN = 0.03  # a setting that helps less is not worth a line in a file
SLOWEST = 0.8  # with less memory, at least this part of the speed must stay
ROUNDS = 3
STREAMS = 8  # at a time, for throughput
ANSWER = 48  # tokens of an answer
WORDS = 160  # of a prompt
KV_PART = {"fp8": 0.55, "int8": 0.6, "int4": 0.45}  # most memory of K/V, scales included, as a part of that in 16 bits
MEMORY_TOKENS = 8192  # of the K/V pool, with less memory; fewer if the model's context is shorter
OWN = ("goal", "rounds", "out")
FLAGS = SERVE_FLAGS
Setting = Mapping[str, Value]  # values of settings by name


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement. tokens_per_s: of all streams together, prompts not counted; first_s: until the first token of a
    stream, in the median; memory: bytes of all processes of the server (of shared pages, their part)"""

    tokens_per_s: float
    first_s: float
    seconds: float
    memory: int


@dataclass(frozen=True, slots=True)
class Goal:
    """What is better. streams: at a time; better: how many times better a measurement is than another"""

    about: str
    streams: int
    better: Callable[[Measured, Measured], float]


def _less_memory(new: Measured, old: Measured) -> float:
    """Returns how many times less memory is taken; 0 if too much of the speed is lost."""
    return old.memory / new.memory if new.tokens_per_s >= SLOWEST * old.tokens_per_s else 0.0


GOALS: Mapping[str, Goal] = {
    "latency": Goal("the time of one answer alone", 1, lambda new, old: old.seconds / new.seconds),
    "throughput": Goal(
        f"tokens/s of {STREAMS} streams together", STREAMS, lambda new, old: new.tokens_per_s / old.tokens_per_s
    ),
    "memory": Goal(
        f"memory, while at least {SLOWEST:.0%} of the tokens/s of {STREAMS} streams stay", STREAMS, _less_memory
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trial:
    """A kind of setting, and its values beside the usual one. changes: whether it changes the model's numbers"""

    name: str
    settings: tuple[Setting, ...]
    changes: bool = False


def trials(
    goal: str, given: Settings, forecast: Forecast | None, *, on_gpu: bool, stated: Collection[str] = ()
) -> list[Trial]:
    """Returns what is worth measuring.

    forecast: of the model; None if it is not known
    stated: names of settings that the user gave, which are not tried
    """
    cores, worker = usable_cores(), given.worker
    found = []
    if not on_gpu:
        fewer = sorted({cores // 2, cores - 1} - {0, cores}, reverse=True)
        found.append(Trial("threads", tuple({"threads": count} for count in fewer)))
        if goal != "memory":
            found.append(Trial("speculation", ({"speculation": "off"},)))
            if has_low_bit_weights(given):  # else it has no effect
                found.append(Trial("inputs", ({"activations": "int8"},), changes=True))
    if goal == "throughput":
        sizes = (256, 1024) if not on_gpu else (1024, 4096)
        found.append(Trial("step size", tuple(
            {"max_step_tokens": size, "prefill_chunk_size": size} for size in sizes
        )))  # fmt: skip
    if goal == "memory":
        formats: list[Setting] = [{"kv_cache_dtype": name} for name in (("fp8",) if on_gpu else ("int8", "int4"))]
        if forecast is not None and forecast.kv and "kv_cache_gb" not in stated:
            tokens = min(MEMORY_TOKENS, forecast.trained)

            def pool(part: float) -> float:
                return round(max(part * forecast.kv * tokens, 1 << 20) / 2**30 + 0.001, 3)

            found.append(Trial("K/V pool", ({"kv_cache_gb": pool(1.0)},)))
            formats = [{**one, "kv_cache_gb": pool(KV_PART[str(one["kv_cache_dtype"])])} for one in formats]
        found.append(Trial("K/V format", tuple(formats), changes=True))
        if worker.quantization == "auto":
            found.append(Trial("weights", ({"quantization": "int8"}, {"quantization": "int4"}), changes=True))
    return [
        Trial(trial.name, left, trial.changes)
        for trial in found
        if (left := tuple(one for one in trial.settings if not one.keys() & stated))
    ]


def has_low_bit_weights(given: Settings) -> bool:
    """Whether the weights have few bits, so that their inputs can have, too, as far as the flags tell."""
    return given.model.model.endswith(".gguf") or given.worker.quantization not in ("auto", "none")


def parser() -> Parser:
    parser = Parser(
        prog="sluice tune",
        usage="sluice tune --model X [--goal latency|throughput|memory] [--out FILE] [--flag of sluice serve ...]",
        description="Measure a few settings on the model itself, print a table, and write those that help into a file "
        "for `sluice serve --config FILE`.",
    )
    parser.add_argument(
        "--goal", choices=[*GOALS], default="latency",
        help="; ".join(f"{name}: {goal.about}" for name, goal in GOALS.items()).replace("%", "%%") + " [latency]",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=positive_int, default=ROUNDS, metavar="N", help=f"rounds, 2 or more [{ROUNDS}]"
    )
    parser.add_argument(
        "--out", type=new_file, default=Path("sluice-tuned.toml"), metavar="FILE",
        help="file to write [sluice-tuned.toml]",
    )  # fmt: skip
    add_flags(parser, FLAGS)
    return parser


def tune(words: list[str]) -> int:
    """Runs the command and returns its exit code. Raises CliError, and ConfigError for wrong flags."""
    args = parser().read(words)
    given = argparse.Namespace(**{name: value for name, value in vars(args).items() if name not in OWN})
    settings = read(given, os.environ, FLAGS)
    stated = given_values(given, os.environ, FLAGS)
    if args.rounds < 2:
        raise ConfigError("--rounds must be at least 2: one round does not tell how much measurements differ by chance")
    if settings.many:
        raise ConfigError("sluice tune measures one model: give one --model, and neither --models nor --models-dir")
    require_worker_packages()
    if HubModels(settings.model.revision).is_away(settings.model.model):
        raise CliError(
            f"{settings.model.model} is not a path: fetch it with `sluice pull {settings.model.model}`, and give the "
            "path that this prints", 2,
        )  # fmt: skip
    check_writable(args.out)
    on_gpu = bool(visible_gpus()) and settings.worker.device != "cpu"
    forecast = judge_local(settings.model.model, settings, timed=False).forecast
    goal = GOALS[args.goal]
    tuner = Tuner(settings, goal, args.rounds, sys.stderr, measure_server)
    best = tuner.run(trials(args.goal, settings, forecast, on_gpu=on_gpu, stated=stated))
    table = tuner.table()
    print("\n".join(table))
    values: dict[str, Value] = {"model": _absolute(settings.model.model)}
    secret = {flag.name for flag in FLAGS if flag.field.metadata["secret"]}
    values |= {name: value for name, value in stated.items() if name not in secret | {"model"}}
    head = [
        f"sluice tune --goal {args.goal}, on {processor()}, {usable_cores()} cores, {args.rounds} rounds",
        f"better is: {goal.about}",
        *(["other processes ran meanwhile, so measure again when the machine is quiet"] if tuner.was_busy else []),
        *table,
        *(["these settings change the numbers of the model: " + ", ".join(tuner.changing)] if tuner.changing else []),
        *(
            []
            if best
            else ["no setting helped by more than the noise, so all that is not given stays as it is by default"]
        ),
    ]
    notes = {name: "given to sluice tune" for name in values} | tuner.reasons
    write_result(args.out, config_text(values | dict(best), head, notes))
    print(f"\n{args.out} has the settings: sluice serve --config {args.out}")
    return 0


def check_writable(file: Path) -> None:
    """Raises CliError if the file cannot be written, before the measurements rather than after them."""
    try:
        if _in_one_piece(file):
            with tempfile.TemporaryFile(dir=file.resolve().parent):
                pass
        elif not os.access(file, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise CliError(f"--out {file} cannot be written: {error.strerror or error}", 2) from None


def write_result(file: Path, text: str) -> None:
    """Writes a file, which is never there by half. Raises CliError, after it has printed what it could not write."""
    try:
        if _in_one_piece(file):
            target = file.resolve()
            part = target.with_name(f".{target.name}.{os.getpid()}")
            try:
                part.write_text(text, encoding="utf-8")
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
        else:
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        print(text)  # the measurements took minutes
        raise CliError(
            f"--out {file} cannot be written: {error.strerror or error}; it is shown above instead", 1
        ) from None


def _in_one_piece(file: Path) -> bool:
    """Whether another file may take its place: not that of /dev/stdout or a pipe."""
    return not file.exists() or file.is_file()


def _absolute(model: str) -> str:
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


@dataclass(slots=True)
class Row:
    """What the table shows of a setting. ratios: how many times better than the best so far, one for each round;
    noise: of the best so far, by how much its rounds differ; else None"""

    words: str
    measured: list[Measured]
    ratios: list[float] = field(default_factory=list)
    noise: float | None = None
    taken: bool = False


@dataclass(slots=True)
class Tuner:
    """Measures the trials of one model.

    measure: measures a server of these settings
    reasons: of each setting that helps, why it was taken
    """

    settings: Settings
    goal: Goal
    rounds: int
    stream: Sink
    measure: "Callable[[Settings, Goal], Measured]"
    rows: list[Row] = field(default_factory=list)
    changing: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    was_busy: bool = False

    def run(self, found: Sequence[Trial]) -> Setting:
        """Tries one trial after the other. Returns the settings that help."""
        best: dict[str, Value] = {}
        for trial in found:
            options: list[Setting] = [{}, *trial.settings]
            measured = self._rounds(trial.name, [best | dict(option) for option in options])
            rows = [Row(_words(option) or f"without ({_words(best) or 'the defaults'})", each)
                    for option, each in zip(options, measured, strict=True)]  # fmt: skip
            noise = rows[0].noise = self._noise(measured[0])
            for row, each in zip(rows[1:], measured[1:], strict=True):
                if len(each) == self.rounds:
                    row.ratios = [self.goal.better(new, old) for new, old in zip(each, measured[0], strict=True)]
            rows = [row for row in rows if len(row.measured) == self.rounds]
            options = [option for option, each in zip(options, measured, strict=True) if len(each) == self.rounds]
            if len(rows) < 2:
                continue
            chosen = max(range(1, len(rows)), key=lambda n: statistics.median(rows[n].ratios))
            if helps(rows[chosen].ratios, noise):
                rows[chosen].taken = True
                best |= options[chosen]
                why = f"{trial.name}: {_compared(rows[chosen].ratios)} better, with a noise of {noise:.1%}"
                if trial.changes:
                    why += "; changes the numbers of the model"
                    self.changing += [name.replace("_", "-") for name in options[chosen] if name != "kv_cache_gb"]
                self.reasons |= dict.fromkeys(options[chosen], why)
            self.rows += rows
        return best

    def _noise(self, measured: Sequence[Measured]) -> float:
        """Returns by which part the best of several measurements of the same settings is better than the worst."""
        return max(self.goal.better(new, old) for new in measured for old in measured) - 1.0

    def _rounds(self, name: str, options: Sequence[Setting]) -> list[list[Measured]]:
        """Returns the measurements of each option, in rounds; every other round goes backwards.

        An option with which the model cannot be served has fewer. Raises CliError if it cannot be served without one.
        """
        measured: list[list[Measured]] = [[] for _ in options]
        refused: set[int] = set()
        for number in range(self.rounds):
            places = range(len(options)) if number % 2 == 0 else reversed(range(len(options)))
            for place in [place for place in places if place not in refused]:
                print(
                    f"{name}, round {number + 1} of {self.rounds}: {_words(options[place]) or 'the defaults'}",
                    file=self.stream, flush=True,
                )  # fmt: skip
                self.was_busy = self.was_busy or is_busy()
                try:
                    measured[place].append(self.measure(with_values(self.settings, options[place]), self.goal))
                except CliError as error:
                    if not place:
                        raise
                    refused.add(place)
                    print(f"not possible: {str(error).splitlines()[-1]}", file=self.stream, flush=True)
        return measured

    def table(self) -> list[str]:
        """Returns the lines of the table: the medians of each setting, and how they compare."""
        lines = [("SETTING", "TOKENS/S", "FIRST TOKEN", "MEMORY", "BETTER", "")]
        for row in self.rows:
            each = row.measured
            ratio = _compared(row.ratios) if row.noise is None else f"noise {row.noise:.1%}"
            lines.append((
                row.words, f"{statistics.median(one.tokens_per_s for one in each):.1f}",
                f"{statistics.median(one.first_s for one in each) * 1000:.0f} ms",
                size_text(statistics.median(one.memory for one in each)), ratio,
                "taken" if row.taken else "",
            ))  # fmt: skip
        widths = [max(len(line[column]) for line in lines) for column in range(6)]
        return [
            "  ".join([line[0].ljust(widths[0]), *(text.rjust(width) for text, width in
                       zip(line[1:], widths[1:], strict=True))]).rstrip()
            for line in lines
        ]  # fmt: skip


def _compared(ratios: Sequence[float]) -> str:
    return f"x{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else ""


def helps(ratios: Sequence[float], noise: float) -> bool:
    """Whether a setting is better in every round, and in the median by MARGIN and by more than the noise."""
    return min(ratios) > 1.0 and statistics.median(ratios) >= 1.0 + max(MARGIN, noise)


def _words(option: Setting) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in option.items())


# The measurement of one server.

# Three kinds of text: a question, prose to go on with, and code to repeat with a change, which drafts guess easily.
TEXTS = (
    "Explain to a new colleague how rain forms, and why some clouds bring none. ",
    "The ship had left the harbour before dawn, and nobody on the pier had seen who stood at the wheel. ",
    "def total(prices):\n    result = 0\n    for price in prices:\n        result += price\n    return result\n",
)


OPEN = ("api_keys", "api_key", "admin_keys", "ssl_certfile", "ssl_keyfile", "record", "store", "run_dir")


def measure_server(settings: Settings, goal: Goal) -> Measured:
    """Starts a server, warms it up, and measures the answers to a few requests. Raises CliError."""
    alone = with_values(settings, dict.fromkeys(("port", "worker_metrics_port"), 0) | dict.fromkeys(OPEN, ""))
    # All settings are in the flags: a SLUICE_ variable would win over one that is the default again.
    with served(to_argv(alone, FLAGS), io.StringIO(), without_settings(os.environ)) as url:
        server = Server(url)
        model = server.models()[0]
        _answers(server, model, goal.streams, "warm")
        began = time.perf_counter()
        answers = _answers(server, model, goal.streams, "run")
        seconds = time.perf_counter() - began
        memory = sum(_memory(pid) for pid in descendants(os.getpid()))
    tokens = sum(tokens for tokens, _ in answers)
    return Measured(tokens / seconds, statistics.median(first for _, first in answers), seconds, memory)


def prompt(text: str, mark: str) -> str:
    """Returns a prompt of about WORDS words. mark: makes the beginnings of prompts differ, so that none is cached"""
    return f"{mark}. " + text * (WORDS // len(text.split()) + 1)


def _answers(server: Server, model: str, streams: int, mark: str) -> list[tuple[int, float]]:
    """Returns of each answer how many tokens it has, and the seconds until the first. With one stream, the requests
    follow each other; else there are as many at a time as there are streams."""
    count = max(len(TEXTS), streams)
    found: list[tuple[int, float]] = []
    failed: list[CliError] = []

    def ask(number: int) -> None:
        try:
            found.append(_answer(server, model, prompt(TEXTS[number % len(TEXTS)], f"{mark} {number}")))
        except CliError as error:
            failed.append(error)

    if streams == 1:
        for number in range(count):
            ask(number)
    else:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]
    return found


def _answer(server: Server, model: str, text: str) -> tuple[int, float]:
    body = {"model": model, "prompt": text, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    first = 0.0
    for piece in server.stream("completions", body):
        if piece and not first:
            first = time.perf_counter() - began
    return ANSWER, first or time.perf_counter() - began


def descendants(pid: int) -> Iterator[int]:
    """Yields the processes that a process has started, theirs included."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(folder.name))
    waiting = list(parents.get(pid, ()))
    while waiting:
        one = waiting.pop()
        yield one
        waiting += parents.get(one, ())


def _memory(pid: int) -> int:
    """Returns the bytes of memory of a process, of pages that several share its part; 0 if it has ended."""
    with suppress(OSError, ValueError):
        for line in (Path("/proc") / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
