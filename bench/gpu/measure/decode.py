"""Measures decode steps at several batch sizes, and compares them with the time to read the necessary bytes."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.gpu.environment import Environment, Row, spec_of
from bench.gpu.setup.harness import Harness, Setup, build_harness
from bench.gpu.setup.roofline import kv_bytes, weight_bytes
from bench.gpu.setup.step_kinds import GREEDY, MIXED, StepKind, start
from worker.ops.quantized_weight import Scheme

PROFILED = 64  # number of further steps that a caller may run under the profiler
WARM_UP = 12  # steps that are not timed: they compile kernels and capture graphs

BASE, INT8, FP8 = Setup(), Scheme("int8"), Scheme("fp8")


@dataclass(frozen=True, slots=True)
class Format:
    """A format to measure.

    weight: bytes per weight of the layers; 0: the bytes of the model's dtype.
    kv: bytes per value in the K/V cache; 0: the bytes of the model's dtype.
    """

    name: str
    setup: Setup = BASE
    weight: int = 0
    kv: int = 0


PLAIN = Format("")
FORMATS = (
    Format("fp8 K/V", Setup(kv="fp8"), kv=1),
    Format("int8 weights", Setup(weights=INT8), weight=1),
    Format("fp8 weights", Setup(weights=FP8), weight=1),
    Format("fp8 weights and K/V", Setup(weights=FP8, kv="fp8"), weight=1, kv=1),
)


def measure(env: Environment, model: str) -> Iterator[Row]:
    yield from _decode(env, model, PLAIN, env.sizes.batches)
    for format in FORMATS:
        yield from _decode(env, model, format, env.sizes.batches[::2])
    for kind in MIXED:
        yield from _mixed(env, model, kind, env.sizes.idle_batch)


def _mixed(env: Environment, model: str, kind: StepKind, batch: int) -> Iterator[Row]:
    """Measures a batch in which one sequence is not a plain decode. The lower bound counts only plain decodes."""
    what: Row = {"model": model, "format": kind.name, "batch": batch}
    if late := env.skip_reason(10):
        yield what | {"note": late}
        return
    setup, length = Setup(step_tokens=kind.chunk), max_length(env)
    harness = build_harness(env, spec_of(model), setup, slots=batch + 1, max_length=length)
    harness.fill_cache_randomly()
    yield what | _timed_row(env, harness, batch, PLAIN, kind)


def _decode(env: Environment, model: str, format: Format, batches: tuple[int, ...]) -> Iterator[Row]:
    what: Row = {"model": model, "format": format.name or str(env.dtype).removeprefix("torch.")}
    if late := env.skip_reason(10):
        yield what | {"note": late}
        return
    harness = build_harness(env, spec_of(model), format.setup, slots=max(batches), max_length=max_length(env))
    harness.fill_cache_randomly()
    for batch in batches:
        if late := env.skip_reason(5):
            yield what | {"batch": batch, "note": late}
            continue
        yield what | _timed_row(env, harness, batch, format, GREEDY)


def _timed_row(env: Environment, harness: Harness, batch: int, format: Format, kind: StepKind) -> Row:
    spec, own = harness.spec, env.dtype.itemsize
    seconds, context = time_decodes(env, harness, batch, kind=kind)
    cached = kv_bytes(spec, [round(context)] * batch, format.kv or own)
    moved = weight_bytes(spec, batch, format.weight or own, own) + cached
    return {
        "batch": batch, "context": round(context), "ms a step": 1e3 * seconds,
        "tokens/s": batch / seconds, "floor ms": 1e3 * moved / env.limits.get("copy", float("nan")),
        "% of floor": env.share_of_copy(moved, seconds),
    }  # fmt: skip


def max_length(env: Environment) -> int:
    return env.sizes.context + WARM_UP + env.sizes.steps * env.sizes.rounds + PROFILED + 8


def time_decodes(env: Environment, harness: Harness, batch: int, *, kind: StepKind = GREEDY) -> tuple[float, float]:
    """Returns the seconds per step (median of the rounds), and the mean context length during the rounds.

    The steps before the first round compile kernels and capture graphs; they are not timed.
    """
    sizes = env.sizes
    start(harness, kind, batch, sizes.context, WARM_UP + sizes.rounds * sizes.steps)
    harness.run_steps(WARM_UP)
    rounds = []
    for _ in range(sizes.rounds):
        env.clock.wait()
        begun = time.perf_counter()
        harness.run_steps(sizes.steps)
        env.clock.wait()
        rounds.append((time.perf_counter() - begun) / sizes.steps)
    context = max(harness.contexts()) - sizes.steps * (sizes.rounds - 1) / 2
    return statistics.median(rounds[1:]), context
