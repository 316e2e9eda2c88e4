"""Measures how a model is loaded: time, processor time, page faults and memory. Each load has a process of its own.

    python -m bench.micro.load --model FILE [--rounds 3] [--against CHECKOUT]

A table in Markdown has a row for each load. With `--against`, loads with the code of another checkout of this project
alternate with those of this one, so that both meet the same other work on the machine. The time of imports is not
included. A load begins with the model's file wherever it lies; the second and later rounds find it in the page cache.
"""

import json
import os
import resource
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.config.flags import Parser

HERE = Path(__file__).resolve().parents[2]
POOL_GB = 0.1  # a small K/V pool, because its memory does not belong to the weights
MIB = 1 << 20
COLUMNS = (
    ("seconds", "s", "{:.2f}"),
    ("user", "user, s", "{:.2f}"),
    ("system", "system, s", "{:.2f}"),
    ("faults", "page faults", "{:,}"),
    ("peak", "peak, MiB", "{:,}"),
    ("anonymous", "after it, MiB", "{:,}"),
    ("huge", "in huge pages, MiB", "{:,}"),
    ("busy", "load average", "{:.1f}"),
)  # field of a measurement, heading, format


def main(words: list[str]) -> int:
    parser = Parser(prog="python -m bench.micro.load", description="Measures how a model is loaded.")
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a GGUF file or the folder of a checkpoint")
    add("--rounds", type=int, default=3)
    add("--against", type=Path, metavar="CHECKOUT", help="also load with the code of this checkout, in turns")
    add("--once", action="store_true", help="load in this process and print the measurement as JSON")
    args = parser.read(words)
    if args.once:
        print(json.dumps(measured(args.model)))
        return 0
    try:
        for line in table(args):
            print(line, flush=True)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().splitlines()[-1]
        print(f"python -m bench.micro.load: {args.model} was not loaded: {reason}", file=sys.stderr)
        return 1
    return 0


def table(args: Namespace) -> Iterator[str]:
    """Yields the lines of the table. Raises CalledProcessError if a load fails."""
    yield " | ".join(("| code", *(heading for _, heading, _ in COLUMNS))) + " |"
    yield "|---" + "|--:" * len(COLUMNS) + "|"
    sources = {"this": HERE} if args.against is None else {"other": args.against.resolve(), "this": HERE}
    for _ in range(args.rounds):
        for name, source in sources.items():
            found = _in_a_process(source, args.model.resolve())
            cells = (form.format(found[field]) for field, _, form in COLUMNS)
            yield " | ".join((f"| {name}", *cells)) + " |"


def _in_a_process(source: Path, model: Path) -> dict[str, Any]:
    """Loads the model with the code of a checkout. -P: the folder of this file holds names of packages"""
    command = (sys.executable, "-P", __file__, "--once", "--model", str(model))
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(command, env=environment, cwd=source, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(model: Path) -> dict[str, Any]:
    """Loads the model in this process and returns the fields of COLUMNS. Memory is that of the whole process."""
    from worker.ops.openmp import spin_briefly

    spin_briefly()  # must run before torch is imported
    from shared.config.settings import ModelConfig
    from shared.config.worker import WorkerConfig
    from worker.engine.build import load_engine

    before, begun = os.times(), time.perf_counter()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    engine = load_engine(ModelConfig(model=str(model)), WorkerConfig(device="cpu", kv_cache_gb=POOL_GB))
    seconds, after = time.perf_counter() - begun, os.times()
    used = resource.getrusage(resource.RUSAGE_SELF)
    kept = _memory()
    del engine
    return {
        "seconds": seconds,
        "user": after.user - before.user,
        "system": after.system - before.system,
        "faults": used.ru_minflt - faults,
        "peak": used.ru_maxrss * 1024 // MIB,
        "anonymous": kept["Anonymous"] // MIB,
        "huge": kept["AnonHugePages"] // MIB,
        "busy": os.getloadavg()[0],
    }


def _memory() -> dict[str, int]:
    """Returns the sums over all mappings of this process, in bytes, by their names in /proc."""
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {name.removesuffix(":"): int(size) * 1024 for name, size, _ in lines}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
