"""Section `correct`: checks each kernel (one row each), and the bits and sampled ids of whole steps."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bench.gpu.checks.cases import CASES
from bench.gpu.checks.determinism import check_bits, check_ids
from bench.gpu.checks.random_inputs import Case
from bench.gpu.environment import Environment, Row
from bench.gpu.tables import FAIL, PASS

BOUND = 1e-2  # the largest allowed error, as a share of the largest value; for bfloat16
# Ids must be equal. Weights in few bits are rounded to bfloat16, too, before they are multiplied.
BOUNDS = {"sample": 0.0, "few_bits": 2e-2}


def check(env: Environment, argument: str) -> Iterator[Row]:
    name, _, model = argument.partition(" ")
    match name:
        case "invariance":
            yield from check_bits(env, model)
        case "ids":
            yield from check_ids(env, model)
        case _:
            yield kernel(env, name, CASES[name](env))


@torch.inference_mode()
def kernel(env: Environment, name: str, cases: Iterable[Case]) -> Row:
    """Runs all cases of one kernel and returns its row, whose note describes the first failure."""
    count, worst, note = 0, 0.0, ""
    bound = BOUNDS.get(name, BOUND)
    for case in cases:
        count += 1
        try:
            with poisoned():
                got = case.got()
            error = max(_error(one, other) for one, other in zip(got, case.want(), strict=True))
        except Exception as problem:
            env.clock.wait()  # raises if the device is unusable
            error, note = float("inf"), note or f"{case.label}: {type(problem).__name__}: {problem}"[:200]
        if not error <= bound:
            note = note or f"{case.label}: {error:.2g}"
        worst = max(worst, error)
    row: Row = {"what": name, "cases": count, "worst": worst, "bound": bound, "result": FAIL if note else PASS}
    return row | ({"note": note} if note else {})


def _error(got: Tensor, want: Tensor) -> float:
    """Returns the largest difference as a share of the largest expected value; for ids, how many of them differ."""
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
    """Makes `torch.empty` fill its tensors with NaN, so that values that a kernel fails to write are noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
