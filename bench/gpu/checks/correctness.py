"""Whether it computes what it should, before how fast: a row a kernel, and rows for bits and ids of whole steps."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bench.gpu.checks.cases import CASES
from bench.gpu.checks.determinism import same_bits, same_ids
from bench.gpu.checks.random_inputs import Case
from bench.gpu.context import Place, Row
from bench.gpu.tables import FAIL, PASS

BOUND = 1e-2  # of the largest value, in bfloat16


def check(place: Place, argument: str) -> Iterator[Row]:
    name, _, model = argument.partition(" ")
    match name:
        case "invariance":
            yield from same_bits(place, model)
        case "ids":
            yield from same_ids(place, model)
        case _:
            yield kernel(place, name, CASES[name](place))


@torch.inference_mode()
def kernel(place: Place, name: str, cases: Iterable[Case]) -> Row:
    """All cases of one kernel; the note tells of the first that failed."""
    count, worst, note = 0, 0.0, ""
    bound = 0.0 if name == "sample" else BOUND
    for case in cases:
        count += 1
        try:
            with poisoned():
                got = case.got()
            error = max(_error(one, other) for one, other in zip(got, case.want(), strict=True))
        except Exception as problem:
            place.clock.wait()  # raises where the device itself is gone
            error, note = float("inf"), note or f"{case.label}: {type(problem).__name__}: {problem}"[:200]
        if not error <= bound:
            note = note or f"{case.label}: {error:.2g}"
        worst = max(worst, error)
    row: Row = {"what": name, "cases": count, "worst": worst, "bound": bound, "result": FAIL if note else PASS}
    return row | ({"note": note} if note else {})


def _error(got: Tensor, want: Tensor) -> float:
    """The largest difference, as a share of the largest value wanted; of ids, how many differ."""
    if got.shape != want.shape:
        return float("inf")
    if not want.is_floating_point():
        return float((got != want.to(got.device)).sum())
    if not got.numel():
        return 0.0
    wide = want.float().to(got.device)
    value = float((got.float() - wide).abs().max() / wide.abs().max().clamp(min=1e-6))
    return value if value == value else float("inf")


@contextmanager
def poisoned() -> Iterator[None]:
    """Whatever `torch.empty` gives is full of NaN, so that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
