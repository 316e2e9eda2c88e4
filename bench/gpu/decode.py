"""Decode: ms a step at several batch sizes, against the bytes that a step must read."""

import statistics
import time
from collections.abc import Iterator

from bench.gpu.floor import kv_bytes, weight_bytes
from bench.gpu.place import Place, Row, spec_of
from bench.gpu.rig import Rig, rig

PROFILED = 64  # steps that may follow
WARM_UP = 12  # steps: kernels are compiled and graphs captured in them


def measure(place: Place, model: str) -> Iterator[Row]:
    spec, sizes = spec_of(model), place.sizes
    made = rig(place, spec, slots=max(sizes.batches), longest=longest(place))
    made.scatter()
    for batch in sizes.batches:
        if late := place.short(8):
            yield {"model": model, "batch": batch, "note": late}
            continue
        seconds, context = steady(place, made, batch)
        size = place.dtype.itemsize
        moved = weight_bytes(spec, size, size) + kv_bytes(spec, [round(context)] * batch, size)
        yield {
            "model": model, "batch": batch, "context": round(context), "ms a step": 1e3 * seconds,
            "tokens/s": batch / seconds, "floor ms": 1e3 * moved / place.facts.get("copy", float("nan")),
            "% of floor": place.share_of_copy(moved, seconds),
        }  # fmt: skip


def longest(place: Place) -> int:
    return place.sizes.context + WARM_UP + place.sizes.steps * place.sizes.rounds + PROFILED + 8


def steady(place: Place, made: Rig, batch: int, *, temperature: float = 0.0, top_p: float = 1.0) -> tuple[float, float]:
    """Seconds a step, the median of the rounds, and the mean context meanwhile."""
    sizes = place.sizes
    made.pretend(batch, sizes.context, temperature=temperature, top_p=top_p)
    made.turns(WARM_UP)
    rounds = []
    for _ in range(sizes.rounds):
        place.clock.wait()
        begun = time.perf_counter()
        made.turns(sizes.steps)
        place.clock.wait()
        rounds.append((time.perf_counter() - begun) / sizes.steps)
    context = statistics.mean(made.contexts()) - sizes.steps * (sizes.rounds - 1) / 2
    return statistics.median(rounds[1:]), context
