"""Measures the gain from each part of the fast path: runs the same steps with and without that part.

All other parts are as in the server. Options of `--gpu-options` that are off by default are switched on one by one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from bench.gpu.environment import NEEDS_CUDA, Environment, Row, spec_of
from bench.gpu.measure.decode import max_length, time_decodes
from bench.gpu.measure.isolated_kernels import layer_alone
from bench.gpu.measure.prefill import to_first_token
from bench.gpu.setup.harness import SERVED, Setup, build_harness
from bench.gpu.setup.step_kinds import DRAWN
from bench.gpu.setup.unfused import UNFUSED, X_NORM, without
from bench.gpu.setup.weights import random_weights
from worker.ops.launch_options import GPU_OPTIONS, NO_OPTIONS, options_named
from worker.spec import ModelSpec

BASE = Setup(options=SERVED)
NEEDS = {"weight_prefetch": ("pdl",)}  # option → other options without which it has no effect
ROW_COUNTS = (1, 32, 2048)  # rows of two decode batches, and of a long prompt's step


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the fast path. setup: the server without the part, or, if the part is `optional`, with it."""

    name: str
    setup: Setup
    prefill: bool = False  # whether the part affects long prompts too
    cuda: bool = False  # whether the part exists on GPUs only
    optional: bool = False  # whether the server has the part only with a flag


def _without_fusion(fusion: str) -> Part:
    return Part(fusion, replace(BASE, operations=without(fusion)), prefill=True, cuda=True)


def _with_option(name: str) -> Part:
    """Returns the part for an option, together with the options that it needs."""
    names = [*NEEDS.get(name, ()), name]
    setup = Setup(options=options_named([*SERVED.names, *names]))
    return Part(" ".join(names), setup, prefill=True, cuda=True, optional=True)


SANDWICH_NORMS = _without_fusion(X_NORM)
PARTS = (
    Part("batch invariance", replace(BASE, invariant=False), prefill=True),
    Part("graphs", replace(BASE, graphs=False), cuda=True),
    Part("overlap", replace(BASE, overlap=False), cuda=True),
    Part("graphs and overlap", replace(BASE, graphs=False, overlap=False), cuda=True),
    *(_without_fusion(name) for name in UNFUSED if name != X_NORM),
    SANDWICH_NORMS,
    *(Part(name, Setup(options=NO_OPTIONS), prefill=True, cuda=True) for name in SERVED.names),
    *(_with_option(name) for name in GPU_OPTIONS if name not in SERVED.names),
    Part("all GPU options", Setup(options=options_named([*GPU_OPTIONS])), prefill=True, cuda=True, optional=True),
)


def measure(env: Environment, model: str) -> Iterator[Row]:
    spec, parts, what = spec_of(model), _parts(env, model), Row(model=model)
    if not parts:
        return
    base = _figures(env, spec, BASE, prefill=True)
    for part in parts:
        if why := NEEDS_CUDA if part.cuda and not env.cuda else env.skip_reason(12):
            yield what | {"without": part.name, "note": why}
            continue
        found = _figures(env, spec, part.setup, prefill=part.prefill)
        for figure, seconds in found.items():
            having, lacking = (seconds, base[figure]) if part.optional else (base[figure], seconds)
            yield what | _row(part.name, figure, having, lacking)
    if model == env.models[0]:
        yield what | _sampling(env, spec)
        yield from (what | row for row in _activations(env, spec))


def _parts(env: Environment, model: str) -> list[Part]:
    """Returns the parts to measure: all parts for the first model; for others, parts that the first model lacks."""
    first = env.models[0]
    if model == first:
        return [part for part in PARTS if part is not SANDWICH_NORMS or spec_of(model).post_norms]
    return [SANDWICH_NORMS] if spec_of(model).post_norms > spec_of(first).post_norms else []


def _figures(env: Environment, spec: ModelSpec, setup: Setup, *, prefill: bool) -> dict[str, float]:
    """Returns the seconds of a decode step with one sequence, of one with many sequences, and of a long prompt."""
    weights = random_weights(spec, env.dtype, env.device, invariant=setup.invariant, seed=env.seed)
    harness = build_harness(env, spec, setup, slots=env.sizes.idle_batch, max_length=max_length(env), weights=weights)
    harness.fill_cache_randomly()
    found = {f"decode, batch {n}": time_decodes(env, harness, n)[0] for n in (1, env.sizes.idle_batch)}
    if prefill:
        prompt = env.sizes.prompt
        long = build_harness(env, spec, setup, slots=1, max_length=prompt + 8, weights=weights)
        found[f"prefill, {prompt}"] = to_first_token(env, long, prompt)
    return found


def _sampling(env: Environment, spec: ModelSpec) -> Row:
    """Measures the cost of temperature and top-p, compared with greedy sampling."""
    batch = env.sizes.idle_batch
    harness = build_harness(env, spec, BASE, slots=batch, max_length=max_length(env))
    harness.fill_cache_randomly()
    greedy = time_decodes(env, harness, batch)[0]
    drawn = time_decodes(env, harness, batch, kind=DRAWN)[0]
    return _row("temperature and top-p", f"decode, batch {batch}", drawn, greedy)


def _activations(env: Environment, spec: ModelSpec) -> Iterator[Row]:
    """Measures the gain from eight-bit activations in the matrix products of one layer with eight-bit weights.

    The comparison is with sixteen-bit activations, for which the kernel widens the same weights to sixteen bits.
    """
    for kind, rows in product(("int8", "fp8"), ROW_COUNTS):
        part, what = f"{kind} activations, with {kind} weights", f"a layer's products, {rows} rows"
        if why := env.skip_reason(8) if env.cuda else NEEDS_CUDA:
            yield {"without": part, "what": what, "note": why}
            continue
        yield _row(part, what, *(layer_alone(env, spec, rows, variant) for variant in (f"{kind}-dynamic", kind)))


def _row(part: str, what: str, having: float, lacking: float) -> Row:
    """Returns a result row: a step's time with and without a part. A negative gain means that the part costs time."""
    return {
        "without": part, "what": what, "ms with": 1e3 * having, "ms without": 1e3 * lacking,
        "gain %": 100 * (lacking / having - 1),
    }  # fmt: skip
