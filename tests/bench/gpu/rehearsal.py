"""Runs the sections of `sluice bench gpu` on a fake GPU, and finds what would be an error on a real GPU.

`python -m tests.bench.gpu.rehearsal [--compile] [SECTION ...]` prints a line for each task. Tasks that start processes
are left out. The rehearsal needs a process of its own, because the tests' process has Triton in interpreter mode.
"""

import gc
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from bench.gpu.environment import Environment
from bench.gpu.offline.compiling import compile_all
from bench.gpu.offline.cuda import gpu
from bench.gpu.offline.machine import Machine
from bench.gpu.offline.rehearsals import APART, bench_environment, few_experts, run_task, section_tasks
from bench.gpu.sections import SECTIONS, Task
from bench.gpu.shapes import FULL

MODELS = ("gemma-3-1b",)
SIZES = replace(
    FULL, batches=(1, 256), steps=1, rounds=2, context=64, prompt=700, new=8, idle_batch=8, sweep=(1, 96, 2048)
)


def run(machine: Machine, task: Task, env: Environment) -> list[str]:
    """Runs a task on the fake GPU, and returns the errors that it found."""
    begun = len(machine.launches.compilations)
    rows, findings = run_task(machine, task, env)
    notes = [str(row["note"]) for row in rows if "note" in row]
    # A fake GPU leaves outputs as they were allocated, and numbers in them may be anything.
    notes = [note for note in notes if not note.endswith((": inf", ": nan"))]
    made = len(machine.launches.compilations) - begun
    print(f"{task.section.name} {task.argument}: {len(rows)} rows, {made} compilations", flush=True)
    told = [f"{task.section.name} {task.argument}: {note}" for note in notes + findings]
    return told if rows else [*told, f"{task.section.name} {task.argument}: nothing was measured"]


def main(words: list[str]) -> int:
    every = tuple(section.name for section in SECTIONS if section.name not in APART)
    names = tuple(word for word in words if word in every) or every
    problems = []
    with (
        nullcontext() if "--compile" in words else few_experts(),
        gpu() as machine,
        tempfile.TemporaryDirectory() as folder,
        bench_environment(Path(folder), MODELS, SIZES) as env,
    ):
        gc.freeze()  # imported objects stay for ever, so garbage collections need not visit them
        for task in section_tasks(MODELS, names):
            problems += run(machine, task, env)
    if "--compile" in words:
        problems += compile_all({one.key: one for one in machine.launches.compilations}.values())
    print(*problems, sep="\n", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
