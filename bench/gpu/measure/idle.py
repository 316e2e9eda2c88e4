"""Measures how long the device idles although sequences are waiting, and the host's time for a step."""

from collections.abc import Iterator
from dataclasses import replace

from bench.gpu.environment import NEEDS_CUDA, Environment, Row, spec_of
from bench.gpu.measure.decode import max_length, time_decodes
from bench.gpu.setup.harness import build_harness
from bench.gpu.setup.profiler import extent, gaps, record
from bench.gpu.shapes import CONFIGS

LONG_US = 5.0  # gaps of at least this length do not lie between two kernels of one graph
STEPS = 20


def measure(env: Environment, model: str) -> Iterator[Row]:
    yield from _host(env)
    batch = env.sizes.idle_batch
    if not env.cuda:
        yield {"what": "device without work", "batch": batch, "note": NEEDS_CUDA}
        return
    harness = build_harness(env, spec_of(model), slots=batch, max_length=max_length(env))
    harness.fill_cache_randomly()
    seconds, _ = time_decodes(env, harness, batch)
    yield {"what": f"a step, {model}, not profiled", "batch": batch, "value": 1e3 * seconds, "unit": "ms"}
    spans = record(env, lambda: harness.run_steps(STEPS))
    whole, between = extent(spans), gaps(spans)
    long = [gap for gap in between if gap >= LONG_US]
    rows = {
        "kernels and copies a step": (len(spans) / STEPS, ""),
        "a step, profiled": (whole / STEPS / 1e3, "ms"),
        "device busy a step": ((whole - sum(between)) / STEPS / 1e3, "ms"),
        "device without work": (100 * sum(between) / whole, "%"),
        f"… in gaps of {LONG_US:.0f} µs and more": (100 * sum(long) / whole, "%"),
        "… as the step not profiled has it": (100 * (1 - (whole - sum(between)) / STEPS / 1e6 / seconds), "%"),
        "longest gap": (max(between, default=0.0), "µs"),
    }
    for what, (value, unit) in rows.items():
        yield {"what": what, "batch": batch, "value": value, "unit": unit}


def _host(env: Environment) -> Iterator[Row]:
    """Measures a step of a tiny model. Its time is host work: scheduling, packing, launching, reading, publishing."""
    config = CONFIGS["tiny"]
    spec = replace(spec_of("tiny"), layers=spec_of("tiny").layers[:1])
    for batch in env.sizes.host_batches:
        harness = build_harness(env, spec, slots=batch, max_length=max_length(env))
        seconds, _ = time_decodes(env, harness, batch)
        what = f"host: a step of one layer of {config['hidden_size']}"
        yield {"what": what, "batch": batch, "value": 1e6 * seconds, "unit": "µs"}
