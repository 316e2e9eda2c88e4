"""Measures a model that several GPUs compute together: decodes and a prompt, with one GPU and with more.

Each number of GPUs is a process of its own (bench.micro.engine), which starts the other ranks.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu.environment import Environment, Row
from bench.gpu.setup.checkpoint import checkpoint

COUNTS = (1, 2, 4, 8)
LINES = ("decode 1", "decode 8", "decode 32", "prefill 2048")
NEED_S = 40.0
LONGEST = 4096


def measure(env: Environment, model: str) -> Iterator[Row]:
    found = torch.cuda.device_count() if env.cuda else 0
    if found < 2:
        yield {"model": model, "GPUs": found, "note": "not measured: it needs at least 2 GPUs"}
        return
    yield from rates(env, model, [count for count in COUNTS if count <= found], LINES)


def rates(env: Environment, model: str, counts: list[int], lines: tuple[str, ...]) -> Iterator[Row]:
    """Yields a row for each number of GPUs and each line of bench.micro.engine."""
    folder, of_one = checkpoint(env, model), dict[str, float]()
    for count in counts:
        what: Row = {"model": model, "GPUs": count}
        if late := env.skip_reason(NEED_S):
            yield what | {"note": late}
            continue
        for line, rate in _run(env, folder, count, lines).items():
            first = of_one.setdefault(line, rate)
            yield what | {"what": line, "tokens/s": rate, "of one GPU": rate / first}


def _run(env: Environment, folder: Path, count: int, lines: tuple[str, ...]) -> dict[str, float]:
    """Returns the tokens per second of each line. Raises RuntimeError with the end of the log if the engine fails."""
    words = [
        sys.executable, "-m", "bench.micro.engine", "--model", str(folder), "--device", env.device.type,
        "--tensor-parallel-size", str(count), "--max-seq-len", str(LONGEST), "--no-rank-check-weights",
        *([] if env.cuda else ["--kv-cache-gb", "0.1"]),
    ]  # fmt: skip
    done = subprocess.run(words, input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{count} GPUs: {done.stderr.strip()[-500:]}")
    _, *said = (dict[str, Any](json.loads(line)) for line in done.stdout.splitlines())
    return {line: float(one["tokens_s"]) for line, one in zip(lines, said, strict=True)}
