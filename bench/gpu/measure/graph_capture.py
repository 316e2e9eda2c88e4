"""Measures the time in which a worker's start captures its CUDA graphs, and the memory of the graphs."""

import time
from collections.abc import Iterator

import torch

from bench.gpu.environment import NEEDS_CUDA, Environment, Row, spec_of
from bench.gpu.measure.decode import max_length
from bench.gpu.setup.harness import build_harness


def measure(env: Environment, model: str) -> Iterator[Row]:
    """Captures twice and reports only the second time, because the first capture also compiles kernels."""
    slots = max(env.sizes.batches)
    what: Row = {"model": model, "batches up to": slots}
    if not env.cuda:
        yield what | {"note": NEEDS_CUDA}
        return
    for attempt in range(2):
        harness = build_harness(env, spec_of(model), slots=slots, max_length=max_length(env))
        count, free, begun = 0, torch.cuda.mem_get_info(env.device)[0], time.perf_counter()

        def captured() -> None:
            nonlocal count
            count += 1

        harness.runner.capture_graphs(captured)
        env.clock.wait()
        seconds, taken = time.perf_counter() - begun, free - torch.cuda.mem_get_info(env.device)[0]
        if attempt:
            each = 1e3 * seconds / max(count, 1)
            yield what | {"graphs": count, "s": seconds, "ms a graph": each, "GB": taken / 1e9}
        del harness
