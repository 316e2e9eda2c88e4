"""Reports a step's launches and host time without a GPU, to compare before and after a change.

python -m bench.gpu.offline.launch_report [--models NAME,...] [--batch 8] [--gpu-options NAME,...]

Runs the worker's loop on the fake GPU. Launches per layer are counted in steps without CUDA graphs, as the difference
between models of different depth. The host's time is this machine's CPU time for a step, without the time of the fake
operations. It includes the worker's own work for every PyTorch operation, but not PyTorch's time to launch an operation
on a GPU (a few µs each).
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.client.summary import aligned
from bench.gpu.clock import HostClock
from bench.gpu.environment import Environment, spec_of
from bench.gpu.offline.cuda import gpu
from bench.gpu.offline.machine import Machine
from bench.gpu.setup.harness import Harness, Setup, build_harness
from bench.gpu.setup.step_kinds import GREEDY, MIXED, StepKind, start
from bench.gpu.shapes import CONFIGS, FULL
from shared.config.flags import Parser, comma_separated
from worker.ops.launch_options import GPU_OPTIONS, GpuOptions, options_named

CONTEXT = 600  # tokens before the first step: more than one split of attention
WARM_UP, STEPS = 16, 12
SHALLOW, DEEP = 6, 12  # layers: multiples of the pattern in which windows and full attention alternate
MODELS = ("llama-3.2-3b", "gemma-3-1b", "gpt-oss-20b")


@dataclass(frozen=True, slots=True)
class Figures:
    """A step's launches of Triton kernels and of PyTorch's operations, its graph replays, and its host seconds."""

    triton: float
    torch: float
    replays: float
    host_s: float
    names: Counter[str]


def main(words: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(words)
    options = options_named(list(args.gpu_options))
    columns = (
        "model",
        "step",
        "Triton a layer",
        "others a layer",
        "besides",
        "replays",
        "host µs",
        "host µs, no graph",
    )
    rows: list[Sequence[str]] = [columns]
    counts = []
    for model in args.models:
        for kind in (GREEDY, *MIXED):
            row, names = _row(model, kind, args.batch, options)
            rows.append(row)
            if kind is GREEDY:
                counts.append(f"{model}, kernels of {DEEP - SHALLOW} layers: {names}")
    print(aligned([list(map(str, row)) for row in rows]), "", *counts, sep="\n")
    return 0


def _row(model: str, kind: StepKind, batch: int, options: GpuOptions) -> tuple[tuple[str, ...], str]:
    graphed = Setup(step_tokens=kind.chunk, options=options)
    eager = replace(graphed, graphs=False)
    shallow, deep = (step_figures(model, kind, batch, eager, layers) for layers in (SHALLOW, DEEP))
    replayed = step_figures(model, kind, batch, graphed, DEEP)
    triton, others = ((getattr(deep, name) - getattr(shallow, name)) / (DEEP - SHALLOW) for name in ("triton", "torch"))
    besides = deep.triton + deep.torch - DEEP * (triton + others)
    shown = f"{triton:.1f}", f"{others:.1f}", f"{besides:.0f}", f"{replayed.replays:.1f}"
    costs = f"{1e6 * replayed.host_s:.0f}", f"{1e6 * deep.host_s:.0f}"
    names = ", ".join(f"{name} {count:.0f}" for name, count in (deep.names - shallow.names).most_common())
    return (f"{model}, {DEEP} layers", f"{batch} decodes, {kind.name}".strip(", "), *shown, *costs), names


def step_figures(model: str, kind: StepKind, batch: int, setup: Setup, layers: int) -> Figures:
    """Measures steps of the given kind on the fake GPU. The host's time is the median of the steps."""
    with gpu() as machine:
        env, spec = _environment(), spec_of(model)
        spec = replace(spec, layers=(spec.layers * DEEP)[:layers])
        length = CONTEXT + WARM_UP + STEPS + 8
        harness = build_harness(env, spec, setup, slots=batch + 1, max_length=length)
        start(harness, kind, batch, CONTEXT, WARM_UP + STEPS)
        harness.run_steps(WARM_UP)
        machine.launches.names.clear()
        machine.launched.clear()
        replays = machine.replays
        seconds = [_host_seconds(machine, harness) for _ in range(STEPS)]
    launched, names = machine.launches.names, machine.launches.names + machine.launched
    return Figures(
        launched.total() / STEPS, machine.launched.total() / STEPS, (machine.replays - replays) / STEPS,
        statistics.median(seconds), Counter({name: round(count / STEPS) for name, count in names.items()}),
    )  # fmt: skip


def _host_seconds(machine: Machine, harness: Harness) -> float:
    begun, faked = time.thread_time(), machine.faked_s + machine.launches.faked_s
    harness.run_steps(1)
    return time.thread_time() - begun - (machine.faked_s + machine.launches.faked_s - faked)


def _environment() -> Environment:
    cuda = torch.device("cuda")
    return Environment(cuda, torch.bfloat16, FULL, HostClock(), (), Path(), 1, 1e12)


def _parser() -> Parser:
    parser = Parser(prog="python -m bench.gpu.offline.launch_report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--models", type=comma_separated(CONFIGS), default=",".join(MODELS), metavar="NAME,...")
    add("--batch", type=int, default=8, metavar="N", help="decodes of a step [default 8]")
    add("--gpu-options", type=comma_separated(GPU_OPTIONS), default=(), metavar="NAME,...")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
