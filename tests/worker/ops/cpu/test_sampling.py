"""Sampling and log-probabilities of the C library are those of PyTorch, with every instruction set."""

import math
import random as host_random
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.worker.ops.harness.cpu_tiers import HERE, needs_library, use
from tests.worker.ops.harness.sampling import Row, params_of
from worker.ops.sampling.native import logprobs_native, sample_native
from worker.ops.sampling.reference import EVERY, PlainParams, logprobs_torch, sample_torch, wrong_draws

pytestmark = needs_library
WIDTHS = [1, 2, 15, 16, 17, 511, 512, 513, 5000, 151_936]


def drawn(dice: host_random.Random, width: int) -> Row:
    return Row(
        temperature=dice.choice([0.0, 1e-3, 0.2, 0.7, 1.0, 1.3, 60.0]),
        top_k=dice.choice([0, 0, 1, 2, 20, 300, 5000, width, width + 3]),
        top_p=dice.choice([1.0, 1e-6, 0.3, 0.9, 0.95, 0.9999]),
        min_p=dice.choice([0.0, 0.0, 1e-4, 0.05, 1.0]),
        seed=dice.getrandbits(64),
        position=dice.randrange(100_000),
    )


def wild(width: int, rows: int) -> torch.Tensor:
    """Returns rows of logits: peaked, flat, full of ties, with forbidden tokens, and with negative zeros."""
    noise = torch.Generator().manual_seed(width)
    logits = torch.randn(rows, width, generator=noise) * torch.tensor([0.1, 1.0, 3.0, 9.0]).repeat(rows)[:rows, None]
    logits[1::3] = logits[1::3].round()
    logits[2::5, ::2] = -math.inf
    logits[3::7] = -0.0
    logits[:, width // 2] += 1.0
    return logits


@pytest.mark.parametrize("width", WIDTHS)
def test_draws_are_those_of_pytorch_and_of_every_instruction_set(width: int) -> None:
    dice, rows = host_random.Random(width), 24 if width > 10_000 else 120
    logits, params = wild(width, rows), params_of([drawn(dice, width) for _ in range(rows)]).plain
    expected, seen = sample_torch(logits, params, EVERY), []
    for each in HERE:
        with use(each):
            seen.append(sample_native(logits, params, EVERY))
    assert not wrong_draws(logits, params, EVERY, seen[0], expected).any()
    assert int((seen[0] != expected).sum()) <= 1, "e^x differs in its last bit, which decides nearly no draw"
    assert all(torch.equal(one, seen[0]) for one in seen)


@pytest.mark.parametrize("width", WIDTHS)
def test_logprobs_are_those_of_pytorch_and_of_every_instruction_set(width: int) -> None:
    rows = 8 if width > 10_000 else 40
    logits = wild(width, rows)
    ids = torch.randint(0, width, (rows,), generator=torch.Generator().manual_seed(1))
    for top in sorted({0, 1, min(5, width), min(20, width), min(700, width)}):
        expected, seen = logprobs_torch(logits, ids, top), []
        for each in HERE:
            with use(each):
                seen.append(logprobs_native(logits, ids, top))
        assert torch.equal(seen[0][1], expected[1])
        for one in seen:  # a row without any possible token has NaN
            torch.testing.assert_close(one, seen[0], atol=0, rtol=0, equal_nan=True)
        torch.testing.assert_close(seen[0], expected, atol=4e-6, rtol=0, equal_nan=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_have_the_ids_of_pytorch(value: float, temperature: float) -> None:
    for width, tier in product((3, 16, 700), HERE):
        logits = torch.zeros(4, width)
        logits[0, width - 1] = logits[1, 1] = value
        logits[2] = value
        params = params_of([Row(temperature=temperature, top_k=2, top_p=0.5, seed=3)] * 4).plain
        with use(tier):
            assert torch.equal(sample_native(logits, params), sample_torch(logits, params))


def test_rows_may_be_views_of_other_memory() -> None:
    wide = torch.randn(6, 3, 900, generator=torch.Generator().manual_seed(2))
    logits, params = wide[:, 1, 50:850], params_of([Row(top_p=0.8, seed=seed) for seed in range(6)]).plain
    ids = torch.arange(12)[::2]
    for given in (logits, logits.t().contiguous().t()):
        assert torch.equal(sample_native(given, params), sample_native(logits.contiguous(), params))
        for one, other in zip(
            logprobs_native(given, ids, 3), logprobs_native(logits.contiguous(), ids, 3), strict=True
        ):
            assert torch.equal(one, other)
    assert sample_native(logits[:0], of_rows(params, 0)).shape == (0,)


def of_rows(params: PlainParams, count: int) -> PlainParams:
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    return replace(params, **{name: getattr(params, name)[:count] for name in names})


@pytest.mark.parametrize("id", [-1, 9, 1 << 40])
def test_logprob_of_a_token_beyond_the_vocabulary_is_refused(id: int) -> None:
    with pytest.raises(IndexError, match="less than 9"):
        logprobs_native(torch.zeros(2, 9), torch.tensor([3, id]), 1)
