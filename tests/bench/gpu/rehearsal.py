"""`sluice bench gpu`'s sections on a GPU that is not there: that each runs to its end and asks for nothing impossible.

`python -m tests.bench.gpu.rehearsal [--compile] [SECTION ...]`: a line for each task. Those that start processes of
their own are left out. In a process of its own, because the tests' process has Triton in interpreter mode.
"""

import gc
import sys
import tempfile
import traceback
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.gpu.clock import clock_of
from bench.gpu.environment import Environment, spec_of
from bench.gpu.offline.checkpoint import LAYERS
from bench.gpu.offline.compiling import compile_all
from bench.gpu.offline.cuda import gpu
from bench.gpu.offline.machine import Machine
from bench.gpu.sections import SECTIONS, Options, Task, tasks
from bench.gpu.setup import profiler
from bench.gpu.shapes import FULL
from worker.model.spec import ModelSpec

MODELS = ("gemma-3-1b",)
SIZES = replace(
    FULL, batches=(1, 256), steps=1, rounds=2, context=64, prompt=700, new=8, idle_batch=8, sweep=(1, 96, 2048)
)
APART = ("start", "served", "peer")


def few_layers(model: str, layers: int = 0) -> ModelSpec:
    return spec_of(model, LAYERS.get(model, 2))


def run(machine: Machine, task: Task, env: Environment) -> list[str]:
    """What went wrong."""
    module, function = task.section.call.split(":")
    loaded = import_module(module)
    begun, machine.findings[:] = len(machine.launches.compilations), []
    stand_ins: dict[str, Any] = {"spec_of": few_layers, "record": lambda env, run, copy=None: run() or SPANS}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for name in stand_ins.keys() & vars(loaded).keys():
            stack.enter_context(patch.object(loaded, name, stand_ins[name]))
        try:
            rows += getattr(loaded, function)(env, task.argument)
        except Exception:
            machine.findings.append(traceback.format_exc())
    made = machine.launches.compilations
    notes = [str(row["note"]) for row in rows if "note" in row]
    print(f"{task.section.name} {task.argument}: {len(rows)} rows, {len(made) - begun} compilations", flush=True)
    told = [f"{task.section.name} {task.argument}: {note}" for note in notes + machine.findings]
    return told if rows else [*told, f"{task.section.name} {task.argument}: nothing was measured"]


SPANS = [profiler.Span("_linear_kernel", 0.0, 5.0), profiler.Span("_decode_kernel", 6.0, 5.0)]


def main(words: list[str]) -> int:
    options = Options("cuda", MODELS, False, 1, Path("trace"))
    known = [section.name for section in SECTIONS if section.name not in APART]
    names = tuple(word for word in words if word in known) or tuple(known)
    problems = []
    with gpu() as machine, tempfile.TemporaryDirectory() as folder, patch(
        "bench.gpu.checks.cases_kv.attention_torch", lambda q, *rest, **how: torch.empty_like(q)
    ), patch(
        "bench.gpu.checks.cases_experts.experts_torch", lambda h, *rest, **how: torch.empty_like(h)
    ), patch("bench.gpu.measure.isolated_kernels.MIN_TOTAL_BYTES", 1):  # fmt: skip
        cuda = torch.device("cuda")
        env = Environment(
            cuda, torch.bfloat16, SIZES, clock_of(cuda), MODELS, Path(folder), 1, 1e12, Path(folder) / "trace"
        )
        gc.freeze()  # what is imported by now stays, and collections need not look at it
        for task in tasks(names, options):
            problems += run(machine, task, env)
    if "--compile" in words:
        problems += compile_all({one.key: one for one in machine.launches.compilations}.values())
    print(*problems, sep="\n", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
