"""Section `correct`: checks each kernel (one row each), and the bits and sampled ids of whole steps."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bench.gpu.checks.cases import CASES
from bench.gpu.checks.determinism import check_bits, check_ids, check_long
from bench.gpu.checks.random_inputs import Case
from bench.gpu.checks.row_bits import check_rows
from bench.gpu.environment import Environment, Row
from bench.gpu.tables import FAIL, PASS

BOUND = 1e-2  # the largest allowed error for bfloat16, as a share of the largest expected value
# Sampled ids must be equal. Few-bit weights get a larger bound, because they are also rounded to bfloat16.
BOUNDS = {"sample": 0.0, "low_bit": 2e-2}


def check(env: Environment, argument: str) -> Iterator[Row]:
    name, _, model = argument.partition(" ")
    match name:
        case "invariance":
            yield from check_bits(env, model)
        case "rows":
            yield from check_rows(env, model)
        case "long":
            yield from check_long(env, model)
        case "ids":
            yield from check_ids(env, model)
        case _:
            yield kernel(env, name, CASES[name](env))


@torch.inference_mode()
def kernel(env: Environment, name: str, cases: Iterable[Case]) -> Row:
    """Runs all cases of one kernel and returns its row.

    The row's note describes the first failure, or says how many sampled ids differ by rounding.
    """
    count, worst, note, rounded, drawn = 0, 0.0, "", 0, 0
    bound = BOUNDS.get(name, BOUND)
    for case in cases:
        count += 1
        try:
            with poisoned():
                got = case.got()
            want = case.want()
            error = max(_error(one, other) for one, other in zip(got, want, strict=True))
            if case.wrong is not None and error:
                differ, error = error, float(case.wrong(got, want).sum())
                rounded += int(differ - error)
            drawn += len(got[0]) if case.wrong is not None else 0
        except Exception as problem:
            env.clock.wait()  # raises if the device is unusable
            error, note = float("inf"), note or f"{case.label}: {type(problem).__name__}: {problem}"[:200]
        if not error <= bound:
            note = note or f"{case.label}: {error:.2g}"
        worst = max(worst, error)
    row: Row = {"what": name, "cases": count, "worst": worst, "bound": bound, "result": FAIL if note else PASS}
    if rounded:
        note = f"{note}; " * bool(note) + f"{rounded} of {drawn} ids differ by rounding"
    return row | ({"note": note} if note else {})


def _error(got: Tensor, want: Tensor) -> float:
    """Returns the largest difference as a share of the largest expected value. For ids: the number of different ids."""
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
