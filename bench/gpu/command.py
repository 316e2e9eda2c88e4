"""`sluice bench gpu`: everything about one NVIDIA GPU in one call, with random weights and without a network."""

import argparse
import random
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

from bench.client.summary import to_json
from bench.gpu.driver import Drive, Ended
from bench.gpu.sections import SECTIONS, Options, tasks
from bench.gpu.shapes import CONFIGS, DEFAULT_MODELS
from bench.gpu.tables import Table, as_data, page
from shared.arguments import comma_separated, new_file, positive_float
from shared.flags import Parser

BUDGET_S = 520.0
ABOUT = """Measures the worker on one GPU: random weights of real shapes made there, no network.

sections:
""" + "\n".join(f"  {section.name:10} {section.title}" for section in SECTIONS)


def main(words: Sequence[str]) -> int:
    """0 when all is well, 1 when a check or a measurement failed. Raises ConfigError, BenchError."""
    args = _parser().read(list(words))
    options = _options(args)
    chosen = tasks((*args.only, "trace") if options.trace else args.only, options)
    command = shlex.join(["sluice", "bench", "gpu", *words])
    with ExitStack() as stack:
        log = stack.enter_context(args.log.open("wb")) if args.log else None
        drive = Drive(
            options,
            time.time() + args.budget,
            log,
            lambda table: _show(table, drive),
            lambda: _save(drive, args, command),
        )
        stack.enter_context(_ending())
        begun = time.time()
        tables = drive.run(chosen)
    print(f"{time.time() - begun:.0f} s in all")
    return 0 if all(table.well for table in tables) else 1


@contextmanager
def _ending() -> Iterator[None]:
    """The first SIGTERM or SIGINT ends what is being measured, and the process that measures; the tables stay."""

    def end(number: int, frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise Ended

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(table: Table, drive: Drive) -> None:
    """As soon as it is whole."""
    if len(drive.tables) == 1:
        print(*drive.about, "", sep="\n", flush=True)
    print(table.text(), flush=True)


def _save(drive: Drive, args: argparse.Namespace, command: str) -> None:
    """The files hold what there is so far, whatever comes."""
    tables = list(drive.tables.values())
    if args.out:
        args.out.write_text(page(tables, [f"`{command}`", "", *drive.about]) + "\n")
    if args.json:
        data = {"command": command, "about": drive.about, "facts": drive.facts, "sections": as_data(tables)}
        args.json.write_text(to_json(data))


def _options(args: argparse.Namespace) -> Options:
    seed = args.seed if args.seed >= 0 else random.randrange(1 << 31)
    return Options(args.device, args.models, args.device == "cpu", seed, args.trace)


def _parser() -> Parser:
    parser = Parser(prog="sluice bench gpu", description=ABOUT)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny sizes, to see that all of it runs")
    add(
        "--models", type=comma_separated(CONFIGS), default=",".join(DEFAULT_MODELS), metavar="NAME,...",
        help=f"of {', '.join(CONFIGS)}; sections of one model take the first [default %(default)s]",
    )  # fmt: skip
    names = [section.name for section in SECTIONS]
    add(
        "--only",
        type=comma_separated(names, every=names),
        default="all",
        metavar="SECTION,...",
        help="which [default all]",
    )
    add("--budget", type=positive_float, default=BUDGET_S, metavar="SECONDS", help="in all [default %(default).0f]")
    add("--seed", type=int, default=-1, metavar="N", help="of inputs and weights; -1: drawn, and said [default -1]")
    add("--trace", type=new_file, metavar="FILE", help="write a trace for Perfetto, and a table of its kernels")
    add("--json", type=new_file, metavar="FILE", help="write all rows")
    add("--out", type=new_file, metavar="FILE", help="write the tables as Markdown")
    add("--log", type=new_file, metavar="FILE", help="where tracebacks go [default: standard error]")
    return parser
