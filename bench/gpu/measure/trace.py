"""Writes a trace of decode steps for Perfetto, and reports the time of each kernel in the trace."""

import re
from collections import defaultdict
from collections.abc import Iterator

from bench.gpu.environment import Environment, Row, spec_of
from bench.gpu.measure.decode import max_length, time_decodes
from bench.gpu.setup.harness import build_harness
from bench.gpu.setup.profiler import Span, record
from bench.gpu.setup.roofline import kv_bytes, weight_bytes

STEPS = 5
MOST = 24  # maximum number of kernels shown
PRODUCTS = re.compile(r"linear|gated|gemm|gemv|nvjet|cutlass|xmma|splitk|addmm|aten::mm", re.IGNORECASE)
ATTENTION = re.compile(r"attention|attend|_combine_kernel|flash", re.IGNORECASE)


def measure(env: Environment, model: str) -> Iterator[Row]:
    assert env.trace is not None
    spec, batch, size = spec_of(model), env.sizes.idle_batch, env.dtype.itemsize
    harness = build_harness(env, spec, slots=batch, max_length=max_length(env))
    harness.fill_cache_randomly()
    _, context = time_decodes(env, harness, batch)
    spans = record(env, lambda: harness.run_steps(STEPS), env.trace)
    weights, cached = weight_bytes(spec, batch, size, size), kv_bytes(spec, [round(context)] * batch, size)
    yield _row(env, f"all, {model}, batch {batch}", spans, spans, weights + cached)
    for what, pattern, moved in (("matrix products", PRODUCTS, weights), ("attention", ATTENTION, cached)):
        yield _row(env, f"… {what}", [span for span in spans if pattern.search(span.name)], spans, moved)
    yield from _kernels(env, spans)


def _kernels(env: Environment, spans: list[Span]) -> Iterator[Row]:
    """Yields a row for each of the MOST slowest kernels, and one row for all other kernels together."""
    named = defaultdict(list)
    for span in spans:
        named[span.name].append(span)
    groups = sorted(named.items(), key=lambda item: -sum(span.length for span in item[1]))
    for name, group in groups[:MOST]:
        yield _row(env, name[:90], group, spans, 0)
    if rest := [span for _, group in groups[MOST:] for span in group]:
        yield _row(env, f"{len(groups) - MOST} others", rest, spans, 0)


def _row(env: Environment, what: str, spans: list[Span], all_spans: list[Span], moved: float) -> Row:
    """Returns a row for some spans. moved: bytes that these kernels must read in a step, or 0 if not known."""
    taken, whole = sum(span.length for span in spans), sum(span.length for span in all_spans)
    row: Row = {"kernel": what, "calls a step": len(spans) / STEPS, "µs a step": taken / STEPS}
    row["% of device time"] = 100 * taken / whole if whole else 0.0
    if not moved or not taken:
        return row
    return row | {"MB": moved / 1e6, "% of floor": env.share_of_copy(moved, taken / STEPS / 1e6)}
