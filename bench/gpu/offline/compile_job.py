"""One process of a precompilation: finds out what is needed on the fake GPU, and compiles it.

python -m bench.gpu.offline.compile_job CAPABILITY OUT.json [MODEL:WAY | MODEL ...]

`MODEL:WAY` is a worker's start, `MODEL` the bench's sections of that model. Writes a list of `Binary`. It is a process
of its own because the worker remembers which GPU it has.
"""

import gc
import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from bench.gpu.offline.checkpoint import checkpoint
from bench.gpu.offline.compiling import binaries_of
from bench.gpu.offline.cuda import gpu
from bench.gpu.offline.launches import Compilation
from bench.gpu.offline.rehearsals import bench_environment, run_task, section_tasks, started


def main(capability: int, out: Path, jobs: list[str]) -> None:
    needed: dict[str, Compilation] = {}
    for job in jobs:
        model, _, way = job.partition(":")
        found = of_start(capability, model, way) if way else of_sections(capability, model)
        needed |= {one.key: one for one in found}
        gc.collect()
        print(f"sm_{capability} {job}: {len(found)} compilations, {len(needed)} in all", flush=True)
    binaries = binaries_of(needed.values())
    out.write_text(json.dumps([asdict(one) for one in binaries]))


def of_start(capability: int, model: str, way: str) -> list[Compilation]:
    with tempfile.TemporaryDirectory() as root, gpu(capability) as machine:
        (Path(root) / model).mkdir()
        engine = started(checkpoint(Path(root) / model, model), way)
        engine.compiler.close()
    return machine.launches.compilations


def of_sections(capability: int, model: str) -> list[Compilation]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        machine = stack.enter_context(gpu(capability))
        env = stack.enter_context(bench_environment(folder, (model,)))
        for task in section_tasks((model,)):
            _, findings = run_task(machine, task, env)
            for finding in findings:
                print(f"{task.section.name} {task.argument}: {finding}", file=sys.stderr)
    return machine.launches.compilations


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
