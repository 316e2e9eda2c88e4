"""What each part of the fast path brings: the same steps with it and without it, everything else as it is served."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from bench.gpu.context import NEEDS_CUDA, Place, Row, spec_of
from bench.gpu.measure.decode import longest, steady
from bench.gpu.measure.isolated_kernels import layer_alone
from bench.gpu.measure.prefill import to_first_token
from bench.gpu.setup.harness import Setup, rig
from bench.gpu.setup.unfused import AFTER, INSTEAD, without
from bench.gpu.setup.weights import random_weights
from worker.model.spec import ModelSpec

BASE = Setup()
FEW_AND_MANY = (1, 32, 2048)  # rows: decodes, and a step of a long prompt


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    without: Setup
    prefill: bool = False  # it matters to long prompts, too
    cuda: bool = False  # it is not there elsewhere


def _apart(fusion: str) -> Part:
    return Part(fusion, Setup(operations=without(fusion)), prefill=True, cuda=True)


SANDWICH = _apart(AFTER)
PARTS = (
    Part("batch invariance", Setup(invariant=False), prefill=True),
    Part("graphs", Setup(graphs=False), cuda=True),
    Part("overlap", Setup(overlap=False), cuda=True),
    Part("graphs and overlap", Setup(graphs=False, overlap=False), cuda=True),
    *(_apart(name) for name in INSTEAD if name != AFTER),
    SANDWICH,
)


def measure(place: Place, model: str) -> Iterator[Row]:
    spec, parts, what = spec_of(model), _parts(place, model), Row(model=model)
    if not parts:
        return
    base = _figures(place, spec, BASE, prefill=True)
    for part in parts:
        if why := NEEDS_CUDA if part.cuda and not place.cuda else place.short(12):
            yield what | {"without": part.name, "note": why}
            continue
        found = _figures(place, spec, part.without, prefill=part.prefill)
        for figure, seconds in found.items():
            yield what | _row(part.name, figure, base[figure], seconds)
    if model == place.models[0]:
        yield what | _sampling(place, spec)
        yield from (what | row for row in _activations(place, spec))


def _parts(place: Place, model: str) -> list[Part]:
    """Of the first model all that it has, of others what only they have."""
    first = place.models[0]
    if model == first:
        return [part for part in PARTS if part is not SANDWICH or spec_of(model).sandwich_norms]
    return [SANDWICH] if spec_of(model).sandwich_norms > spec_of(first).sandwich_norms else []


def _figures(place: Place, spec: ModelSpec, setup: Setup, *, prefill: bool) -> dict[str, float]:
    """Seconds of a decode step at one sequence and at many, and of a long prompt."""
    weights = random_weights(spec, place.dtype, place.device, invariant=setup.invariant, seed=place.seed)
    made = rig(place, spec, setup, slots=place.sizes.idle_batch, longest=longest(place), weights=weights)
    made.scatter()
    found = {f"decode, batch {n}": steady(place, made, n)[0] for n in (1, place.sizes.idle_batch)}
    if prefill:
        prompt = place.sizes.prompt
        long = rig(place, spec, setup, slots=1, longest=prompt + 8, weights=weights)
        found[f"prefill, {prompt}"] = to_first_token(place, long, prompt)
    return found


def _sampling(place: Place, spec: ModelSpec) -> Row:
    """What temperature and top-p cost beside greedy."""
    batch = place.sizes.idle_batch
    made = rig(place, spec, BASE, slots=batch, longest=longest(place))
    made.scatter()
    greedy, drawn = steady(place, made, batch)[0], steady(place, made, batch, temperature=0.8, top_p=0.95)[0]
    return _row("temperature and top-p", f"decode, batch {batch}", drawn, greedy)


def _activations(place: Place, spec: ModelSpec) -> Iterator[Row]:
    """What it brings to multiply eight bits by eight: the products of one layer, beside those of weights widened to
    sixteen."""
    for kind, rows in product(("int8", "fp8"), FEW_AND_MANY):
        part, what = f"{kind} activations, with {kind} weights", f"a layer's products, {rows} rows"
        if why := place.short(8) if place.cuda else NEEDS_CUDA:
            yield {"without": part, "what": what, "note": why}
            continue
        yield _row(part, what, *(layer_alone(place, spec, rows, way) for way in (f"{kind}-dynamic", kind)))


def _row(part: str, what: str, having: float, lacking: float) -> Row:
    """A negative gain is a price."""
    return {
        "without": part, "what": what, "ms with": 1e3 * having, "ms without": 1e3 * lacking,
        "gain %": 100 * (lacking / having - 1),
    }  # fmt: skip
