"""Mirostat agrees with its definition, written token by token, and brings the surprise to its target."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest

from shared.messages import SamplerChain
from worker.model_runner.sampler_chain import Candidates, bounded, next_bound

V = 80


def candidates(seed: int, scale: float = 3.0) -> Candidates:
    return Candidates(np.arange(V), np.random.default_rng(seed).normal(0, scale, V))


def shares_of(left: Candidates) -> dict[int, float]:
    weights = {id: math.exp(value) for id, value in zip(left.ids.tolist(), left.logits.tolist(), strict=True)}
    return {id: weight / math.fsum(weights.values()) for id, weight in weights.items()}


@pytest.mark.parametrize("mu", [-3.0, 0.5, 2.0, 4.0, 9.0])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_kept_as_defined(seed: int, mu: float) -> None:
    p = shares_of(candidates(seed))
    order = sorted(p, key=lambda id: -p[id])
    kept = {id for id in p if -math.log2(p[id]) <= mu} or {order[0]}
    assert set(bounded(candidates(seed), 2, mu, V).ids.tolist()) == kept
    t = [math.log((at + 2) / (at + 1)) for at in range(V - 1)]
    b = [math.log(p[one] / p[other]) for one, other in pairwise(order)]
    s = math.fsum(x * y for x, y in zip(t, b, strict=True)) / math.fsum(x * x for x in t)
    k = ((s - 1) * 2**mu / (1 - V ** -(s - 1))) ** (1 / s)
    assert set(bounded(candidates(seed), 1, mu, V).ids.tolist()) == set(order[: max(1, int(k))])


def test_surprise_comes_to_its_target() -> None:
    chain, mu, draw, surprises = SamplerChain((), mirostat=2, mirostat_tau=2.5), 5.0, random.Random(1), list[float]()
    for step in range(2000):
        p = shares_of(bounded(candidates(step % 7), 2, mu, V))
        (id,) = draw.choices(list(p), list(p.values()))
        surprises.append(-math.log2(p[id]))
        expected = mu - 0.1 * (surprises[-1] - 2.5)
        mu = next_bound(mu, p[id], chain)
        assert math.isclose(mu, expected, rel_tol=1e-9, abs_tol=1e-9)
    assert abs(sum(surprises[200:]) / 1800 - 2.5) < 0.05


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("mu", [-1e9, 0.0, 1e5])
def test_few_or_equal_tokens_are_no_trouble(version: int, mu: float) -> None:
    for left in (Candidates(np.array([4]), np.array([1.5])), Candidates(np.arange(V), np.zeros(V))):
        assert len(bounded(left, version, mu, V).ids)
