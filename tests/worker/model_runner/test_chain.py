"""Each sampler agrees with its definition, written token by token in float64; chains work in a batch of other rows."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from shared.messages import Dry, SamplerChain, Sampling, WindowPenalties
from shared.messages.requests import LongBreaker
from shared.wire import pack_u32
from worker.model_runner.sampler import sample_rows
from worker.model_runner.sampler_chain import MAX_MATCH, run_chain
from worker.scheduler.sequence import Sequence

VOCAB = 50
Logits = dict[int, float]


def row(seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)
    drawn[5] = drawn[9]  # equally likely
    return drawn


def chained(logits: np.ndarray, tokens: list[int] | None = None, chance: float = 0.5, **settings: object) -> Logits:
    """Runs a chain. Returns the remaining tokens with their logits."""
    result = run_chain(logits, SamplerChain(**settings), np.array(tokens or [], np.int64), chance)  # type: ignore[arg-type]
    return {id: float(value) for id, value in enumerate(result) if value != -np.inf}


def shares_of(logits: Logits) -> Logits:
    peak = max(logits.values())
    weights = {id: math.exp(value - peak) for id, value in logits.items()}
    return {id: weight / sum(weights.values()) for id, weight in weights.items()}


def likeliest(values: Logits) -> list[int]:
    return sorted(values, key=lambda id: (-values[id], id))


def until(order: list[int], shares: Logits, enough: Callable[[float], bool], least: int) -> set[int]:
    """Returns the first tokens of `order`, at least `least`, until the sum of their shares is large enough."""
    kept, total = [], 0.0
    for id in order:
        kept.append(id)
        total += shares[id]
        if enough(total) and len(kept) >= least:
            break
    return set(kept)


@pytest.mark.parametrize("least", [0, 1, 4])
@pytest.mark.parametrize("p", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_truncation_keeps_what_the_definitions_keep(seed: int, p: float, least: int) -> None:
    logits = {id: float(value) for id, value in enumerate(row(seed))}
    shares, best = shares_of(logits), likeliest(logits)
    assert set(chained(row(seed), order=("top_p",), top_p=p, min_keep=least)) == until(
        best, shares, lambda total: total >= p, least
    )
    near = [id for id in best if shares[id] >= p * shares[best[0]] * (1 - 1e-12)]
    assert set(chained(row(seed), order=("min_p",), min_p=p, min_keep=least)) == set(
        near if len(near) >= least else best[: max(1, least)]
    )
    entropy = -sum(share * math.log(share) for share in shares.values())
    typical = sorted(shares, key=lambda id: (abs(-math.log(shares[id]) - entropy), id))
    assert set(chained(row(seed), order=("typ_p",), typical_p=p, min_keep=least)) == until(
        typical, shares, lambda total: total > p, least
    )
    assert set(chained(row(seed), order=("top_k",), top_k=least)) == set(best[:least] if least else best)


@pytest.mark.parametrize("n", [0.5, 1.0, 2.0])
def test_top_n_sigma_keeps_what_is_near_the_highest_logit(n: float) -> None:
    values = [float(value) for value in row(1)]
    mean = sum(values) / VOCAB
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / VOCAB)
    kept = {id for id, value in enumerate(values) if value >= max(values) - n * deviation}
    assert set(chained(row(1), order=("top_n_sigma",), top_n_sigma=n)) == kept and 0 < len(kept) < VOCAB


def test_xtc_drops_all_likely_tokens_but_the_least_likely() -> None:
    logits = {id: float(value) for id, value in enumerate(row(2))}
    likely = [id for id in likeliest(logits) if shares_of(logits)[id] >= 0.1]
    assert len(likely) > 2
    settings = {"order": ("xtc",), "xtc_probability": 0.4, "xtc_threshold": 0.1}
    assert set(chained(row(2), chance=0.39, **settings)) == set(logits) - set(likely[:-1])
    assert set(chained(row(2), chance=0.41, **settings)) == set(logits)
    assert set(chained(row(2), chance=0.1, **{**settings, "xtc_threshold": 0.6})) == set(logits)
    assert set(chained(row(2), chance=0.1, **settings, min_keep=VOCAB)) == set(logits)


@pytest.mark.parametrize(("spread", "exponent"), [(0.0, 1.0), (0.5, 1.0), (0.5, 2.0), (3.0, 1.0)])
def test_temperature_follows_the_entropy(spread: float, exponent: float) -> None:
    logits = {id: float(value) for id, value in enumerate(row(3))}
    shares = shares_of(logits)
    entropy = -sum(share * math.log(share) for share in shares.values()) / math.log(VOCAB)
    low, high = max(0.0, 0.8 - spread), 0.8 + spread
    temperature = low + (high - low) * entropy**exponent if spread else 0.8
    settings = {"temperature": 0.8, "dynatemp_range": spread, "dynatemp_exponent": exponent}
    found = shares_of(chained(row(3), order=("temperature",), **settings))
    expected = shares_of({id: value / temperature for id, value in logits.items()})
    assert all(math.isclose(found[id], share, rel_tol=1e-5, abs_tol=1e-9) for id, share in expected.items())


def test_order_decides_and_a_temperature_of_zero_leaves_one_token() -> None:
    hot = {"temperature": 5.0, "top_p": 0.9}
    first, last = (
        set(chained(row(4), order=order, **hot)) for order in (("temperature", "top_p"), ("top_p", "temperature"))
    )
    assert last < first
    assert list(chained(row(4), order=("temperature",), temperature=0.0)) == [int(row(4).argmax())]


def test_penalties_see_their_window_only() -> None:
    tokens = [1, 2, 2, 3, 4]
    given = {id: float(value) for id, value in enumerate(row(5))}
    for last_n, counts in ((2, {3: 1, 4: 1}), (4, {2: 2, 3: 1, 4: 1}), (-1, {1: 1, 2: 2, 3: 1, 4: 1})):
        penalties = WindowPenalties(last_n, 1.5, presence=0.25, frequency=0.5)
        found = chained(row(5), tokens, order=("penalties",), penalties=penalties)
        for id, value in given.items():
            count = counts.get(id, 0)
            value = value if not count else (value / 1.5 if value > 0 else value * 1.5)
            assert math.isclose(found[id], value - 0.5 * count - 0.25 * bool(count), rel_tol=1e-6)


def extended(tokens: list[int], least: int, breakers: set[int]) -> dict[int, int]:
    """Returns for each token the length of the longest suffix of the text that the token has followed before."""
    found: dict[int, int] = {}
    for place in range(len(tokens) - 1):
        length = 0
        while length <= place and tokens[place - length] == tokens[len(tokens) - 1 - length]:
            if tokens[len(tokens) - 1 - length] in breakers:
                break
            length += 1
        if length >= max(1, least):
            found[tokens[place + 1]] = max(found.get(tokens[place + 1], 0), length)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_dry_penalizes_what_extends_a_repetition(seed: int) -> None:
    draw = random.Random(seed)
    piece = [draw.randrange(4) for _ in range(draw.randrange(1, 9))]
    tokens = [draw.randrange(6) for _ in range(30)] + piece * draw.randrange(1, 4)
    least, breakers = draw.randrange(1, 4), {5} if seed % 2 else set()
    dry = Dry(0.8, 1.75, least, -1, pack_u32(list(breakers)))
    found, given = chained(row(6), tokens, order=("dry",), dry=dry), row(6)
    lengths = extended(tokens, least, breakers)
    for id in range(VOCAB):
        penalty = 0.8 * 1.75 ** (lengths[id] - least) if id in lengths else 0.0
        assert math.isclose(found[id], float(given[id]) - penalty, rel_tol=1e-5, abs_tol=1e-5), (id, lengths)


def test_breaker_of_several_tokens_ends_a_repetition() -> None:
    text = [1, 2, 7, 8, 3, 1, 2, 7, 8, 3]
    free = chained(row(7), text, order=("dry",), dry=Dry(1.0, 2.0, 1, -1))
    given = float(row(7)[1])
    assert math.isclose(free[1], given - 2.0**4, rel_tol=1e-5)
    for heads, tail, length in [([7], (8,), 1), ([2, 7], (8,), 1), ([1, 2], (7, 8), 1), ([2], (8,), 5), ([8], (3,), 0)]:
        dry = Dry(1.0, 2.0, 1, -1, long_breakers=(LongBreaker(pack_u32(heads), tail),))
        broken = chained(row(7), text, order=("dry",), dry=dry)
        expected = given - (2.0 ** (length - 1) if length else 0.0)
        assert math.isclose(broken[1], expected, rel_tol=1e-5), (heads, tail)


def test_text_of_one_token_costs_a_bounded_time_and_penalty() -> None:
    found = chained(row(8), [3] * 20_000, order=("dry",), dry=Dry(1.0, 1.01, 1, -1))
    assert math.isclose(found[3], float(row(8)[3]) - 1.01 ** (MAX_MATCH - 1), rel_tol=1e-5)
    steep = chained(row(8), [3] * 900, order=("dry",), dry=Dry(1.0, 10.0, 1, -1))
    assert math.isfinite(np.float32(steep.get(3, 0.0)))


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_row_without_finite_logits_is_left_alone(value: float) -> None:
    logits = np.full(VOCAB, value, np.float32)
    assert np.array_equal(
        run_chain(logits, SamplerChain(("top_k",), top_k=1), np.zeros(0, np.int64), 0.5), logits, True
    )


CHAIN = SamplerChain(
    ("penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"), temperature=0.9, top_k=30,
    top_p=0.95, min_p=0.01, typical_p=0.97, xtc_probability=0.5, dynatemp_range=0.3,
    penalties=WindowPenalties(8, 1.2), dry=Dry(0.8, 1.75, 2, -1),
)  # fmt: skip


def sequence(seed: int, chain: SamplerChain | None) -> Sequence:
    tokens = [seed % 7, 3, 3, seed % 5, 3, 3]
    return Sequence((b"", seed), tokens, 4, Sampling(9, chain=chain), seed)


def test_row_draws_the_same_in_any_company() -> None:
    rows = [(sequence(seed, CHAIN if seed % 3 else None), 2, ()) for seed in range(12)]
    logits = torch.from_numpy(np.stack([row(seed) for seed in range(12)]))
    together = sample_rows(logits, rows, (0,))
    before = logits.clone()
    for place in range(12):
        alone = sample_rows(logits[place : place + 1], rows[place : place + 1], (0,))
        assert int(alone[0]) == int(together[place])
    assert torch.equal(logits, before) and len(set(together.tolist())) > 3


def test_bias_comes_before_the_chain() -> None:
    one = sequence(1, SamplerChain(("top_k",), top_k=1))
    biased = Sequence((b"", 1), one.tokens, 4, Sampling(9, logit_bias=((11, 100.0),), chain=one.sampling.chain), 1)
    assert sample_rows(torch.from_numpy(row(1))[None], [(biased, 2, ())], (0,)).tolist() == [11]
