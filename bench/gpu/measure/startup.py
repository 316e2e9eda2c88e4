"""Measures the time from the start of `sluice serve` to its first token, with a cold and with a warm page cache.

On a GPU, the first start compiles the kernels. Later starts find the compiled kernels in Triton's cache.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

from bench.client.load_client import Call, run
from bench.client.server import BenchError, served
from bench.gpu.environment import Environment, Row
from bench.gpu.measure.served import flags
from bench.gpu.setup.checkpoint import checkpoint, forget

PROMPT = 16


def measure(env: Environment, model: str) -> Iterator[Row]:
    folder = checkpoint(env, model)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e9
    for state in ("first start: kernels are compiled", "cold", "warm") if env.cuda else ("cold", "warm"):
        if late := env.skip_reason(25 if env.cuda else 10):
            yield {"model": model, "page cache": state, "note": late}
            continue
        if state == "cold":
            state = forget(env, folder)
        ready, first = _start(env, folder)
        yield {"model": model, "page cache": state, "ready s": ready, "first token s": first, "GB": size}


def _start(env: Environment, folder: Path) -> tuple[float, float]:
    """Returns the seconds until the server is ready (polled ten times a second), and until its first token arrives."""
    begun = time.perf_counter()
    with served(str(folder), flags(env)) as target:
        ready = time.perf_counter() - begun
        record = asyncio.run(run(target, [Call(0.0, list(range(300, 300 + PROMPT)), 1)]))[0]
        first = time.perf_counter() - begun
    if record.error:
        raise BenchError(record.error)
    return ready, first
