"""One process of a precompilation: finds the needed kernels by a run on the fake GPU, and compiles them.

python -m bench.gpu.offline.compile_job CAPABILITY OUT.json [largest] [MODEL:WAY | MODEL | kernels ...]

`MODEL:WAY` runs a worker's start, `MODEL` the bench's sections for the model, `kernels` the bench's checks of kernels.
With `largest`, if variants of a kernel differ only in sizes, only the variant with the largest tile is compiled.
OUT.json gets a list of `Binary`. The job is a separate process, because the worker caches which GPU the process has.
"""

import gc
import json
import math
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from bench.gpu.offline.checkpoint import checkpoint
from bench.gpu.offline.compiling import binaries_of
from bench.gpu.offline.cuda import gpu
from bench.gpu.offline.launches import Compilation
from bench.gpu.offline.rehearsals import bench_environment, run_task, section_tasks, started
from bench.gpu.sections import KERNELS, Task

LARGEST, KERNELS_JOB = "largest", "kernels"


def main(capability: int, out: Path, jobs: list[str]) -> None:
    needed: dict[str, Compilation] = {}
    for job in jobs:
        if job == LARGEST:
            continue
        found = found_by(job, capability)
        needed |= {one.key: one for one in found}
        gc.collect()
        print(f"sm_{capability} {job}: {len(found)} compilations, {len(needed)} in all", flush=True)
    binaries = binaries_of(largest(needed.values()) if LARGEST in jobs else needed.values())
    out.write_text(json.dumps([asdict(one) for one in binaries]))


def found_by(job: str, capability: int) -> list[Compilation]:
    model, _, way = job.partition(":")
    if way:
        return of_start(capability, model, way)
    if job == KERNELS_JOB:
        checks = [task for task in section_tasks(("tiny",), ("correct",)) if task.argument in KERNELS]
        return of_tasks(capability, "tiny", checks)
    return of_tasks(capability, model, section_tasks((model,)))


def largest(compilations: Iterable[Compilation]) -> list[Compilation]:
    """Returns the compilation with the largest blocks for each combination of kernel, types and switches."""
    best: dict[object, Compilation] = {}
    for one in compilations:
        names = one.kernel.arg_names
        fixed = {names[path[0]]: value for path, value in one.constants.items()}
        kinds = [kind for kind in one.signature.values() if kind.startswith("*")]
        switches = [(name, value) for name, value in fixed.items() if isinstance(value, bool | str | None)]
        key = one.kernel.__name__, str(kinds), str(switches)
        if key not in best or _size(one) > _size(best[key]):
            best[key] = one
    return list(best.values())


def _size(one: Compilation) -> int:
    names = one.kernel.arg_names
    blocks = [value for path, value in one.constants.items() if names[path[0]].startswith("BLOCK")]
    return math.prod(value for value in blocks if isinstance(value, int)) * int(one.options["num_stages"])


def of_start(capability: int, model: str, way: str) -> list[Compilation]:
    with tempfile.TemporaryDirectory() as root, gpu(capability) as machine:
        (Path(root) / model).mkdir()
        engine = started(checkpoint(Path(root) / model, model), way)
        engine.compiler.close()
    return machine.launches.compilations


def of_tasks(capability: int, model: str, tasks: list[Task]) -> list[Compilation]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        machine = stack.enter_context(gpu(capability))
        env = stack.enter_context(bench_environment(folder, (model,)))
        for task in tasks:
            _, findings = run_task(machine, task, env)
            for finding in findings:
                print(f"{task.section.name} {task.argument}: {finding}", file=sys.stderr)
    return machine.launches.compilations


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
