"""`sluice simulate`: reads the command line, replays traffic, prints what came of it; or calibrates a cost model.

Knows neither the benchmarks' workloads nor how they summarise: `deploy/cli.py` lends both.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shared.config import ConfigError, Settings, with_values
from shared.flags import Parser, add_flags, read, select
from shared.sizes import with_sizes
from worker.openmp import spin_briefly
from worker.simulate import cost as costs
from worker.simulate import report
from worker.simulate.model import Replay, Request, build, replay
from worker.simulate.traffic import Synthetic, Traffic

FLAGS = select(
    (),
    (
        "max_seq_len", "device", "dtype", "kv_cache_dtype", "threads", "kv_cache_gb", "batching_mode",
        "batch_wait_timeout_s", "scheduler_policy", "use_chunked_prefill", "prefill_chunk_size",
        "max_prefill_chunks_per_step", "max_step_tokens", "target_step_s", "max_batch_size",
        "max_waiting_requests", "max_waiting_tokens", "kv_cache_backend", "page_size", "prefix_cache",
        "batch_invariant",
    ),
)  # fmt: skip
SYNTHETIC = "synthetic"
PAGES = 8192


@dataclass(frozen=True, slots=True)
class Lent:
    """What the benchmarks have and a simulation uses."""

    workloads: Mapping[str, Callable[[float, float], Traffic]]  # by name; from rate scale and length scale
    summarize: Callable[[Sequence[Request]], dict[str, float]]
    table: Callable[[dict[str, dict[str, float]]], str]
    place: Callable[[Settings], Settings]  # finds the model to calibrate


def main(words: Sequence[str], lent: Lent) -> int:
    """Runs one command line; raises ConfigError for flags that do not fit, and what loading a model raises."""
    parser = _parser(lent.workloads)
    args = parser.read(words)
    settings = read(args, os.environ, FLAGS)
    if args.calibrate:
        return _calibrate(args, lent.place(with_values(settings, {"model": args.calibrate})))
    return _simulate(args, settings, lent)


def _parser(workloads: Mapping[str, Any]) -> Parser:
    parser = Parser(
        prog="sluice simulate",
        usage="sluice simulate [--workload NAME] [--cost NAME|FILE] [--flag value ...]",
        description="Replays traffic through the worker's scheduler and page pool in virtual time.",
    )
    add = parser.add_argument_group("simulation").add_argument
    names = ", ".join([*workloads, SYNTHETIC])
    add("--workload", metavar="NAME", default="continuous_batching", help=f"comma-separated, or all: {names}")
    add("--cost", metavar="NAME|FILE", default="h200-3b", help=f"{', '.join(costs.PRESETS)}, or a calibration's file")
    add("--pages", type=_count, default=PAGES, help="K/V pool, in pages of --page-size tokens [default %(default)s]")
    add("--rate-scale", type=_positive, default=1.0, help="multiplies a workload's arrivals a second")
    add("--length-scale", type=_positive, default=1.0, help="multiplies a workload's prompt and output lengths")
    add("--speedup-of-traffic", metavar="N", type=_positive, default=1.0, help="the same requests, N times as fast")
    add("--plot", metavar="FILE", type=Path, help="draw the timelines here (needs matplotlib)")
    add("--json", metavar="FILE", type=Path, help="write all numbers here")
    _add_synthetic(parser)
    add = parser.add_argument_group("calibration").add_argument
    add("--calibrate", metavar="MODEL", help="measure this model's steps on this machine instead (minutes)")
    add("--out", metavar="FILE", type=Path, default=Path("cost.json"), help="where to [default %(default)s]")
    add_flags(parser, FLAGS)
    return parser


def _add_synthetic(parser: Parser) -> None:
    add = parser.add_argument_group("--workload synthetic").add_argument
    add("--rate", type=_positive, default=4.0, help="requests a second, Poisson [default %(default)s]")
    add("--duration", type=_positive, default=60.0, help="seconds of arrivals [default %(default)s]")
    add("--prompt-tokens", metavar="LOW-HIGH", type=_bounds, default=(128, 1024), help="[default 128-1024]")
    add("--output-tokens", metavar="LOW-HIGH", type=_bounds, default=(64, 256), help="[default 64-256]")
    add("--traffic-seed", metavar="N", type=int, default=0, help="another one, another traffic [default %(default)s]")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def _bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    bounds = _count(low), _count(high or low)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"must be LOW-HIGH, not {text!r}")
    return bounds


def _simulate(args: argparse.Namespace, settings: Settings, lent: Lent) -> int:
    cost = costs.load(args.cost)
    settings = replace(settings, worker=with_sizes(settings.worker, on_gpu=args.cost in costs.GPUS))
    replays: dict[str, Replay] = {}
    for name in _names(args.workload, lent.workloads):
        replays[name] = _replay(_traffic(name, args, lent).faster(args.speedup_of_traffic), args, settings, cost)
    rows = {name: lent.summarize(replay.requests) for name, replay in replays.items()}
    print(lent.table(rows))
    for name, one in replays.items():
        print(f"\n{name}: {report.outcome(one)}\n{report.timeline(one, report.width())}")
    if args.json:
        content = {name: {"summary": rows[name], **report.numbers(one)} for name, one in replays.items()}
        about = {"cost": asdict(cost), "pages": args.pages, "worker": asdict(settings.worker)}
        args.json.write_text(json.dumps({"about": about, "workloads": content}) + "\n")
    if args.plot:
        report.plot(replays, args.plot)
    return 0


def _names(text: str, workloads: Mapping[str, Any]) -> list[str]:
    names = list(workloads) if text == "all" else text.split(",")
    for name in names:
        if name not in workloads and name != SYNTHETIC:
            raise ConfigError(f"--workload {name} is none of all, {', '.join([*workloads, SYNTHETIC])}")
    return names


def _traffic(name: str, args: argparse.Namespace, lent: Lent) -> Traffic:
    if name != SYNTHETIC:
        return lent.workloads[name](args.rate_scale, args.length_scale)
    return Synthetic(
        rate=args.rate, duration=args.duration, prompt=args.prompt_tokens, output=args.output_tokens,
        seed=args.traffic_seed,
    ).make()  # fmt: skip


def _replay(traffic: Traffic, args: argparse.Namespace, settings: Settings, cost: costs.CostModel) -> Replay:
    try:
        scheduler, pool = build(settings.worker, args.pages, settings.model.max_seq_len)
    except ValueError as error:
        raise ConfigError(f"--pages {args.pages}: {error}") from error
    return replay(traffic, scheduler, pool, cost)


def _calibrate(args: argparse.Namespace, settings: Settings) -> int:
    spin_briefly()
    from worker.model.checkpoint import CheckpointError
    from worker.model.families import UnsupportedModel
    from worker.simulate.calibrate import measure

    try:
        steps = measure(settings, _say)
    except (CheckpointError, UnsupportedModel) as error:
        _say(f"sluice simulate: {error}")
        return 3
    cost = costs.fit(steps)
    costs.save(args.out, cost, steps, model=args.calibrate, device=settings.worker.device)
    print(f"{args.out}: {cost}, at most {costs.worst_error(cost, steps):.0%} off")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
