"""The `sluice simulate` command: replays workloads in virtual time, or measures the cost of a step on this machine."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from bench.client.load_client import Record
from bench.client.summary import Summary, summarize, table
from bench.client.workloads import WORKLOADS, Scale
from bench.simulate import cost as costs
from bench.simulate import report
from bench.simulate.replay import Replay, Request, build, replay
from bench.simulate.traffic import VOCAB, Synthetic, Traffic
from deploy.launcher.child_command import CliError, with_local_model
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, add_flags, comma_separated, new_file, positive_float, positive_int, read, select
from shared.config.settings import Settings, with_values
from shared.config.worker import with_default_sizes
from worker.ops.openmp import spin_briefly

FLAGS = select(
    (),
    (
        "max_seq_len", "device", "dtype", "kv_cache_dtype", "threads", "kv_cache_gb", "batching_mode",
        "batch_wait_timeout_s", "scheduler_policy", "use_chunked_prefill", "prefill_chunk_size",
        "max_prefill_chunks_per_step", "max_step_tokens", "target_step_s", "max_batch_size",
        "max_waiting_requests", "max_waiting_tokens", "kv_cache_backend", "page_size", "prefix_cache",
        "state_checkpoint_tokens", "batch_invariant",
    ),
)  # fmt: skip
SYNTHETIC = "synthetic"
PAGES = 8192


def main(words: Sequence[str]) -> int:
    """Runs one command line. Raises ConfigError for flags that contradict each other, and errors of loading a model."""
    args = parser().read(words)
    _require_matplotlib(args)
    settings = read(args, os.environ, FLAGS)
    if args.calibrate:
        return _calibrate(args, with_local_model(with_values(settings, {"model": args.calibrate})))
    return _simulate(args, settings)


def parser() -> Parser:
    command = Parser(
        prog="sluice simulate",
        usage="sluice simulate [--workload NAME] [--cost NAME|FILE] [--flag value ...]",
        description="Replays traffic through the worker's scheduler and page pool in virtual time.",
    )
    _add_simulation(command)
    _add_synthetic(command)
    _add_calibration(command)
    add_flags(command, FLAGS)
    return command


def _add_simulation(parser: Parser) -> None:
    add = parser.add_argument_group("simulation").add_argument
    names = [*WORKLOADS, SYNTHETIC]
    add(
        "--workload", metavar="NAME,...", type=comma_separated(names, every=WORKLOADS), default="continuous_batching",
        help=f"workloads to replay, or all (without synthetic): {', '.join(names)} [default %(default)s]",
    )  # fmt: skip
    presets = ", ".join(costs.PRESETS)
    add("--cost", metavar="NAME|FILE", default="h200-3b", help=f"{presets}, or a file of --out [default %(default)s]")
    add(
        "--pages",
        metavar="N",
        type=positive_int,
        default=PAGES,
        help="pages of --page-size tokens [default %(default)s]",
    )
    add("--window", metavar="N", type=positive_int, default=0, help="tokens that layers with a sliding window keep")
    add(
        "--window-pages",
        metavar="N",
        type=positive_int,
        default=PAGES,
        help="pages of these layers [default %(default)s]",
    )
    add(
        "--state-slots",
        metavar="N",
        type=positive_int,
        default=0,
        help="states that recurrent layers keep; by default no layer is recurrent",
    )
    add("--rate-scale", metavar="X", type=positive_float, default=1.0, help="multiplies a workload's arrivals a second")
    add(
        "--length-scale", metavar="X", type=positive_float, default=1.0, help="multiplies its prompt and output lengths"
    )
    add(
        "--speedup-of-traffic", metavar="N", type=positive_float, default=1.0, help="the same requests, N times as fast"
    )
    add("--plot", metavar="FILE", type=new_file, help="draw the timelines here (needs matplotlib)")
    add("--json", metavar="FILE", type=new_file, help="write all numbers here")


def _add_synthetic(parser: Parser) -> None:
    add = parser.add_argument_group("--workload synthetic").add_argument
    add(
        "--rate", metavar="X", type=positive_float, default=4.0, help="requests a second, Poisson [default %(default)s]"
    )
    add("--duration", metavar="X", type=positive_float, default=60.0, help="seconds of arrivals [default %(default)s]")
    add("--prompt-tokens", metavar="LOW-HIGH", type=_bounds, default=(128, 1024), help="[default 128-1024]")
    add("--output-tokens", metavar="LOW-HIGH", type=_bounds, default=(64, 256), help="[default 64-256]")
    add("--traffic-seed", metavar="N", type=int, default=0, help="seed of arrivals and lengths [default %(default)s]")


def _add_calibration(parser: Parser) -> None:
    add = parser.add_argument_group("calibration").add_argument
    add("--calibrate", metavar="MODEL", help="measure the steps of this model on this machine instead (takes minutes)")
    add(
        "--out",
        metavar="FILE",
        type=new_file,
        default=Path("cost.json"),
        help="where to write it [default %(default)s]",
    )


def _bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    bounds = positive_int(low), positive_int(high or low)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"must be LOW-HIGH, not {text!r}")
    return bounds


def _require_matplotlib(args: argparse.Namespace) -> None:
    if args.plot and find_spec("matplotlib") is None:
        raise ConfigError(f"--plot needs matplotlib; run: {sys.executable} -m pip install matplotlib")


def _simulate(args: argparse.Namespace, settings: Settings) -> int:
    cost = costs.load(args.cost)
    settings = replace(settings, worker=with_default_sizes(settings.worker, on_gpu=args.cost in costs.GPU_PRESETS))
    replays: dict[str, Replay] = {}
    for name in args.workload:
        replays[name] = _replay(_traffic(name, args).faster(args.speedup_of_traffic), args, settings, cost)
    rows = {name: _summary(replay.requests) for name, replay in replays.items()}
    print(table(rows))
    for name, result in replays.items():
        print(f"\n{name}: {report.outcome(result)}\n{report.timeline(result, report.width())}")
    if args.json:
        content = {name: {"summary": rows[name], **report.numbers(result)} for name, result in replays.items()}
        about = {"cost": asdict(cost), "pages": args.pages, "window": args.window, "state_slots": args.state_slots}
        about["worker"] = asdict(settings.worker)
        args.json.write_text(json.dumps({"about": about, "workloads": content}) + "\n")
    if args.plot:
        report.plot(replays, args.plot)
    return 0


def _traffic(name: str, args: argparse.Namespace) -> Traffic:
    if name != SYNTHETIC:
        workload = WORKLOADS[name]
        return Traffic.of(workload.make(VOCAB, Scale(args.rate_scale, args.length_scale)), workload.sequential)
    return Synthetic(
        rate=args.rate, duration=args.duration, prompt=args.prompt_tokens, output=args.output_tokens,
        seed=args.traffic_seed,
    ).make()  # fmt: skip


def _replay(traffic: Traffic, args: argparse.Namespace, settings: Settings, cost: costs.CostModel) -> Replay:
    try:
        scheduler, pool = build(
            settings.worker, args.pages, settings.model.max_seq_len, window=args.window, window_pages=args.window_pages,
            state_slots=args.state_slots,
        )  # fmt: skip
    except ValueError as error:
        slots = f", --state-slots {args.state_slots}" if args.state_slots else ""
        raise ConfigError(f"--pages {args.pages}{slots}: {error}") from error
    return replay(traffic, scheduler, pool, cost)


def _summary(requests: Sequence[Request]) -> Summary:
    return summarize([
        Record(
            sent=request.sent, stamps=request.stamps, done=request.done, prompt_tokens=request.prompt_tokens,
            completion_tokens=len(request.stamps), cached_tokens=request.cached_tokens, error=request.refused,
        )
        for request in requests
    ])  # fmt: skip


def _calibrate(args: argparse.Namespace, settings: Settings) -> int:
    spin_briefly()
    from bench.simulate.calibrate import measure
    from worker.checkpoint.checkpoint import CheckpointError

    try:
        steps = measure(settings, _progress)
    except CheckpointError as error:
        raise CliError(error, 3) from error
    cost = costs.fit(steps)
    costs.save(args.out, cost, steps, model=args.calibrate, device=settings.worker.device)
    print(f"{args.out}: {cost}, at most {costs.worst_error(cost, steps):.0%} off")
    return 0


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
