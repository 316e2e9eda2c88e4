"""`sluice bench gpu`: measures correctness and speed of one NVIDIA GPU, with random weights and without a network."""

import argparse
import random
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from bench.client.summary import to_json
from bench.gpu.calls.parts import CALLS
from bench.gpu.calls.runner import MINUTES, run_call
from bench.gpu.driver import Driver, Interrupted
from bench.gpu.offline.devices import DEVICES
from bench.gpu.sections import CHECKS, KERNELS, ON_REQUEST, SECTIONS, Options, tasks
from bench.gpu.shapes import CONFIGS, DEFAULT_MODELS
from bench.gpu.tables import Table, as_data, page
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, comma_separated, new_file, positive_float

HOPPER = 90
BUDGET_S = 520.0
ABOUT = """Measures the worker on one GPU, with random weights of real shapes, generated there, and without a network.

sections:
""" + "\n".join(f"  {section.name:10} {section.title}" for section in SECTIONS)


def main(words: Sequence[str]) -> int:
    """Returns 0 if all is well, 1 if a check or a measurement failed. Raises ConfigError and BenchError."""
    args = _parser().read(list(words))
    if args.call:
        return _call(args)
    if args.precompile or args.compile_table:
        return _offline(args)
    options = _options(args)
    files = {"trace": options.trace, "sweep": options.tiles}
    chosen = tasks((*args.only, *(name for name, file in files.items() if file)), options)
    command = shlex.join(["sluice", "bench", "gpu", *words])
    with ExitStack() as stack:
        log = stack.enter_context(args.log.open("wb")) if args.log else None
        driver = Driver(
            options,
            time.time() + args.budget,
            log,
            lambda table: _show(table, driver),
            lambda: _save(driver, args, command),
        )
        stack.enter_context(_interruptible())
        begun = time.time()
        tables = driver.run(chosen)
    print(f"{time.time() - begun:.0f} s in all")
    return 0 if all(table.well for table in tables) else 1


def _offline(args: argparse.Namespace) -> int:
    """Compiles kernels for GPUs on a machine without a GPU."""
    from bench.gpu.offline.compile_table import compile_table
    from bench.gpu.offline.precompile import precompile

    if args.compile_table:
        return compile_table(args.compile_table, args.capability or tuple(DEVICES))
    return precompile(args.precompile, args.capability or (HOPPER,), args.models, args.python_version)


def _call(args: argparse.Namespace) -> int:
    """Runs the parts of --call. The first SIGTERM or SIGINT ends the current parts; earlier results are kept."""
    if args.results is None:
        raise ConfigError("--call needs --results DIR, the folder for the archives of its results")

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        return run_call(args.call, args.results, args.last or args.results, args.device, args.models, args.minutes)
    except KeyboardInterrupt:
        print("ended; the same command with --last continues with what is missing")
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Inside the `with`, the first SIGTERM or SIGINT ends the current measurement; tables so far are kept."""

    def end(number: int, frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(table: Table, driver: Driver) -> None:
    """Prints a table as soon as it is complete."""
    if len(driver.tables) == 1:
        print(*driver.about, "", sep="\n", flush=True)
    print(table.text(), flush=True)


def _save(driver: Driver, args: argparse.Namespace, command: str) -> None:
    """Writes the results so far, so that the files survive any failure."""
    tables = list(driver.tables.values())
    if args.out:
        args.out.write_text(page(tables, [f"`{command}`", "", *driver.about]) + "\n")
    if args.json:
        data = {"command": command, "about": driver.about, "facts": driver.limits, "sections": as_data(tables)}
        args.json.write_text(to_json(data))


def _capabilities(text: str) -> tuple[int, ...]:
    return tuple(map(int, comma_separated([*map(str, DEVICES)])(text)))


def _options(args: argparse.Namespace) -> Options:
    seed = args.seed if args.seed >= 0 else random.randrange(1 << 31)
    return Options(args.device, args.models, args.device == "cpu", seed, args.trace, args.tiles, args.checks)


def _parser() -> Parser:
    parser = Parser(prog="sluice bench gpu", description=ABOUT)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny sizes, to test the benchmark itself")
    add(
        "--models", type=comma_separated(CONFIGS), default=",".join(DEFAULT_MODELS), metavar="NAME,...",
        help=f"of {', '.join(CONFIGS)}; sections that use one model take the first [default %(default)s]",
    )  # fmt: skip
    names = [section.name for section in SECTIONS]
    add(
        "--only",
        type=comma_separated(names, every=[name for name in names if name not in ON_REQUEST]),
        default="all",
        metavar="SECTION,...",
        help=f"which [default all, which is without {', '.join(ON_REQUEST)}]",
    )
    add("--budget", type=positive_float, default=BUDGET_S, metavar="SECONDS", help="total time [default %(default).0f]")
    add("--seed", type=int, default=-1, metavar="N", help="of inputs and weights; -1: random, and printed [default -1]")
    add("--tiles", type=new_file, metavar="FILE", help="measure section sweep, and write its best tiles")
    add("--trace", type=new_file, metavar="FILE", help="write a trace for Perfetto, and measure its kernels")
    add("--json", type=new_file, metavar="FILE", help="write all rows")
    add("--out", type=new_file, metavar="FILE", help="write the tables as Markdown")
    every = (*KERNELS, *CHECKS)
    add(
        "--checks",
        type=comma_separated(every),
        default=(),
        metavar="NAME,...",
        help=f"of section correct: {', '.join(every)}",
    )
    add(
        "--call", choices=CALLS,
        help="run one of three sets of parts, each part in a process of its own; together they run everything, tests "
        "included",
    )  # fmt: skip
    add(
        "--results", type=Path, metavar="DIR", help="for --call: at most 8 files of 16 MB, results and compiled kernels"
    )
    add(
        "--last", type=Path, metavar="DIR", help="for --call: the files of an earlier one [default: those in --results]"
    )
    add("--minutes", type=positive_float, default=MINUTES, help="time for --call [default %(default).0f]")
    add(
        "--precompile", type=Path, metavar="DIR",
        help="on a machine without a GPU: compile what a start and this command need, into a cache that is packed and "
        "must be unpacked at the same path",
    )  # fmt: skip
    add(
        "--compile-table", type=new_file, metavar="FILE",
        help="on a machine without a GPU: compile all kernels for several GPUs, and write what they take as Markdown",
    )  # fmt: skip
    add(
        "--capability", type=_capabilities, default=(), metavar="N,...",
        help=f"of {', '.join(map(str, DEVICES))}, for which kernels are compiled [default of --precompile: {HOPPER}]",
    )  # fmt: skip
    add(
        "--python-version", default=f"{sys.version_info.major}.{sys.version_info.minor}", metavar="X.Y",
        help="of the GPU's machine, for the list of wheels of --precompile [default %(default)s]",
    )  # fmt: skip
    add("--log", type=new_file, metavar="FILE", help="file for tracebacks [default: standard error]")
    return parser
