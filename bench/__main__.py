"""`sluice bench`: measures the speed of a server as its clients see it. Every report names its command."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict

from bench.checkpoints import SHAPES
from bench.client.server import BenchError
from bench.client.summary import aligned, compared, reasons, to_json
from bench.client.workloads import FIRST_ID, VOCAB, WORKLOADS, Scale
from bench.workloads.measure import MODES, Plan, Result, measure
from bench.workloads.report import by_workload, page
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, comma_separated, new_file, positive_float

DEMO_SCALE = 0.5  # lengths are halved, because the demo model's context length is 2,048 tokens
QUICK = (
    "quick (default): compares Sluice over HTTP with a plain transformers loop, for 1, 8 and 32 concurrent requests."
)
ELSE = "workloads: measures a server, or several modes, under load. gpu: measures one GPU. Each has its own --help."
ABOUT = """Runs workloads against a running server, or against a server started here for each compared mode.

workloads:
""" + "\n".join(f"  {workload.name:20} {workload.text}" for workload in WORKLOADS.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line. Returns 0 on success, 1 if something could not be measured, 2 for invalid flags."""
    words = list(sys.argv[1:] if argv is None else argv)
    named = words[:1] in (["workloads"], ["quick"], ["gpu"])
    command = COMMANDS[words[0]] if named else _workloads if "--compare" in words else _quick
    try:
        return command(words[1:] if named else words)
    except ConfigError as error:
        print(f"sluice bench: {error}", file=sys.stderr)
        return 2
    except BenchError as error:
        print(f"sluice bench: {error}", file=sys.stderr)
        return 1


def _quick(words: list[str]) -> int:
    parser = Parser(prog="sluice bench", usage="%(prog)s [quick|workloads|gpu] [--flag value ...]")
    parser.description = f"{QUICK} {ELSE}"
    names = ("demo", *SHAPES)
    parser.add_argument(
        "--models", type=comma_separated(names), default="demo,qwen3-0.6b", metavar="NAME,...",
        help=f"of {', '.join(names)}; all except the demo have random weights [default %(default)s]",
    )  # fmt: skip
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the numbers here as well")
    args = parser.read(words)
    from bench.quick import quick

    print(quick(args.models, args.json))
    return 0


def _gpu(words: list[str]) -> int:
    from bench.gpu.command import main as gpu

    return gpu(words)


def _workloads(words: list[str]) -> int:
    cut = words.index("--") if "--" in words else len(words)
    args = _parser().read(words[:cut])
    plan = _plan(args, tuple(words[cut + 1 :]))
    _check_matplotlib(args)
    results = measure(plan)
    problems = [
        f"{result.workload}, {result.mode}: {count} failed: {reason}"
        for result in results
        for reason, count in reasons(result.records)
    ]
    print(tables(results), *problems, sep="\n")
    _write(args, results, shlex.join(["sluice", "bench", "workloads", *words]), problems)
    return 0


def tables(results: Sequence[Result]) -> str:
    """Formats the results as Markdown. One mode gives one table with a column per workload. Several modes give one
    table per workload, with a column and a ratio per mode."""
    groups = by_workload(results)
    if all(len(group) == 1 for group in groups.values()):
        columns = {name: group[0].summary for name, group in groups.items()}
        return aligned(compared(columns, results[0].mode)) + "\n"
    return "\n".join(
        aligned(compared({result.mode: result.summary for result in group}, name, ratios=True)) + "\n"
        for name, group in groups.items()
    )


def _parser() -> Parser:
    parser = Parser(prog="sluice bench workloads", usage="%(prog)s [--flag value ...] [-- serve flags ...]")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = ABOUT
    add = parser.add_argument
    add(
        "--workload", type=comma_separated(WORKLOADS, every=WORKLOADS), default="all", metavar="NAME,...",
        help="workloads to run [default all]",
    )  # fmt: skip
    add("--url", default="", help="a running server")
    add("--model", default="", metavar="NAME", help="the model's name on that server [default: the first it lists]")
    add("--serve", default="", metavar="MODEL", help="start `sluice serve` with this model; its flags follow --")
    add(
        "--compare", type=comma_separated(MODES), default=(), metavar="MODE,...",
        help=f"compare modes, with one server each: {', '.join(MODES)}; "
        f"without --serve: the demo model at --length-scale {DEMO_SCALE}",
    )  # fmt: skip
    add(
        "--rate-scale", type=positive_float, default=1.0, metavar="X", help="multiplies arrivals per second [default 1]"
    )
    add("--length-scale", type=positive_float, metavar="X", help="multiplies all lengths [default 1]")
    add("--vocab", type=int, default=VOCAB, metavar="N", help="prompts are token ids below this [default %(default)s]")
    add("--json", type=new_file, metavar="FILE", help="write figures and all timestamps")
    add("--html", type=new_file, metavar="FILE", help="write a page with tables and pictures (needs matplotlib)")
    add("--png", type=new_file, metavar="FILE", help="write the pictures as one (needs matplotlib)")
    return parser


def _plan(args: argparse.Namespace, flags: tuple[str, ...]) -> Plan:
    """Returns what to measure. Raises ConfigError for flags that contradict each other."""
    if args.compare and not (args.url or args.serve):
        args.serve, args.length_scale = "demo", args.length_scale or DEMO_SCALE
    if bool(args.url) == bool(args.serve):
        raise ConfigError("say either --url, for a server that runs, or --serve, to start one")
    if args.url and (args.compare or flags):
        raise ConfigError(f"{'--compare' if args.compare else 'flags behind --'} need --serve: --url runs already")
    if args.url and not args.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url begins with http:// or https://, unlike {args.url!r}")
    if args.serve and args.model:
        raise ConfigError("--model goes with --url; with --serve the model is there already")
    if args.vocab <= FIRST_ID:
        raise ConfigError(f"--vocab must be above {FIRST_ID}")
    workloads = [WORKLOADS[name] for name in args.workload]
    scale = Scale(args.rate_scale, args.length_scale or 1.0)
    return Plan(workloads, scale, args.vocab, args.url, args.model, args.serve, flags, args.compare)


def _check_matplotlib(args: argparse.Namespace) -> None:
    """Checks before measuring that matplotlib is installed if the results are to be drawn."""
    if args.html or args.png:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise BenchError("--html and --png need matplotlib: pip install matplotlib") from error


def _write(args: argparse.Namespace, results: Sequence[Result], command: str, problems: Sequence[str]) -> None:
    if args.json:
        args.json.write_text(to_json({"command": command, "results": [asdict(result) for result in results]}))
    if args.html:
        args.html.write_text(page(results, command, problems))
    if args.png:
        from bench.workloads.plots import png

        args.png.write_bytes(png(by_workload(results)))


COMMANDS = {"workloads": _workloads, "quick": _quick, "gpu": _gpu}

if __name__ == "__main__":
    raise SystemExit(main())
