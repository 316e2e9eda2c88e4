"""Runs the workloads over HTTP: a load client sends them to `sluice serve`."""

import asyncio
import shlex
from collections.abc import Iterator, Sequence

from bench.client.load_client import Record, run
from bench.client.server import served
from bench.client.summary import reasons, summarize
from bench.client.workloads import VOCAB, Scale, Workload, chosen
from bench.gpu.environment import Environment, Row
from bench.gpu.setup.checkpoint import checkpoint

LONGEST = 4096
NEED_S = 15.0


def measure(env: Environment, model: str) -> Iterator[Row]:
    folder, arguments = checkpoint(env, model), flags(env)
    with served(str(folder), arguments) as target:
        for workload in workloads(env):
            if late := env.skip_reason(NEED_S):
                yield {"engine": "sluice", "workload": workload.name, "note": late}
                continue
            calls = workload.make(VOCAB, scale(env))
            asyncio.run(run(target, workload.warm_up(calls), sequential=True))
            records = asyncio.run(run(target, calls, sequential=workload.sequential))
            yield summary("sluice", workload.name, records)
    yield {"engine": "sluice", "workload": "flags", "note": shlex.join(arguments)}


def workloads(env: Environment) -> list[Workload]:
    return chosen(env.sizes.workloads)


def scale(env: Environment) -> Scale:
    return Scale(env.sizes.rate_scale, env.sizes.length_scale)


def flags(env: Environment) -> tuple[str, ...]:
    """Returns the flags of `sluice serve`. On a GPU, batch and cache have their default sizes."""
    where = ("--device", env.device.type, "--max-seq-len", str(LONGEST))
    if not env.cuda:
        return (*where, "--max-batch-size", "32", "--kv-cache-gb", "0.1")
    return where


def summary(engine: str, workload: str, records: Sequence[Record]) -> Row:
    found = summarize(records)
    row: Row = {
        "engine": engine, "workload": workload, "requests": found["requests"], "failed": found["failed"],
        "tokens/s": found["tokens_s"], "TTFT p50 ms": found["ttft_p50"], "TTFT p99": found["ttft_p99"],
        "ITL p50 ms": found["itl_p50"], "ITL p99": found["itl_p99"],
    }  # fmt: skip
    why = "; ".join(f"{count} failed: {reason}" for reason, count in reasons(records)[:2])
    return row | ({"note": why} if why else {})
