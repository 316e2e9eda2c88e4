"""Each sampler keeps and changes what its definition says, against loops in plain Python that are written from it."""

import math
import random
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest

from shared.messages import SAMPLERS, SamplerChain, Sampling
from worker.run.sampler_formulas import Row, apply_chain, next_mu

V = 80
Logits = dict[int, float]


def logits(seed: int) -> Logits:
    draw = random.Random(seed)
    return {id: float(np.float32(draw.gauss(0.0, 3.0))) for id in range(V)}


def given(values: Logits, order: str | tuple[str, ...], **options: Any) -> Logits:
    """What a chain leaves of the logits, by id."""
    chosen = {name: options.pop(name) for name in SamplerChain.__struct_fields__ if name in options}
    around = {name: options.pop(name) for name in ("prompt", "output", "draw", "mu") if name in options}
    chain = SamplerChain((order,) if isinstance(order, str) else order, **chosen)
    row = Row(Sampling(9, **options), chain, **{"prompt": [1], "output": [], "vocab_size": V, **around})
    full = np.full(V, -np.inf, np.float32)
    full[list(values)] = list(values.values())
    left = apply_chain(full, row)
    return dict(zip(left.ids.tolist(), left.logits.tolist(), strict=True))


def softmax(values: Logits) -> Logits:
    total = math.fsum(math.exp(value - max(values.values())) for value in values.values())
    return {id: math.exp(value - max(values.values())) / total for id, value in values.items()}


def likeliest(values: Logits) -> list[int]:
    return sorted(values, key=lambda id: (-values[id], id))


def shortest(order: list[int], values: Logits, share: float, least: int = 0) -> set[int]:
    reached = list(accumulate(softmax(values)[id] for id in order))
    count = next((at + 1 for at, sum in enumerate(reached) if sum >= share), len(order))
    return set(order[: max(count, least)])


@pytest.mark.parametrize("seed", range(5))
def test_truncations_keep_what_their_definitions_say(seed: int) -> None:
    values = logits(seed)
    order, p = likeliest(values), softmax(values)
    assert given(values, "top_k", top_k=7).keys() == set(order[:7])
    assert given(values, "top_p", top_p=0.8).keys() == shortest(order, values, 0.8)
    assert given(values, "top_p", top_p=0.1, min_keep=4).keys() == shortest(order, values, 0.1, 4)
    assert given(values, "min_p", min_p=0.1).keys() == {id for id in p if p[id] >= 0.1 * max(p.values())}
    assert given(values, "min_p", min_p=1.0, min_keep=3).keys() == set(order[:3])
    mean = math.fsum(values.values()) / V
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values.values()) / V)
    near = {id for id, value in values.items() if value >= max(values.values()) - 1.5 * deviation}
    assert given(values, "top_n_sigma", top_n_sigma=1.5).keys() == near
    entropy = -math.fsum(share * math.log(share) for share in p.values())
    typical = sorted(p, key=lambda id: abs(-math.log(p[id]) - entropy))
    assert given(values, "typ_p", typical_p=0.6).keys() == shortest(typical, values, 0.6)
    assert given(values, "typ_p", typical_p=0.01, min_keep=5).keys() == set(typical[:5])


@pytest.mark.parametrize("seed", range(5))
def test_xtc_drops_top_choices_but_the_last_of_them_as_often_as_asked(seed: int) -> None:
    values = logits(seed)
    order, p = likeliest(values), softmax(values)
    above = [id for id in order if p[id] >= 0.05]
    assert len(above) > 1
    asked = {"xtc_probability": 0.4, "xtc_threshold": 0.05}
    assert given(values, "xtc", draw=0.39, **asked).keys() == set(order) - set(above[:-1])
    assert given(values, "xtc", draw=0.41, **asked) == values
    assert given(values, "xtc", draw=0.0, min_keep=V, **asked) == values
    assert given(values, "xtc", draw=0.0, xtc_probability=1.0, xtc_threshold=0.51) == values


@pytest.mark.parametrize(("spread", "exponent"), [(0.5, 1.0), (2.0, 1.0), (0.4, 2.5)])
def test_dynamic_temperature_follows_the_entropy(spread: float, exponent: float) -> None:
    values = logits(9)
    p, low, high = softmax(values), max(0.0, 0.9 - spread), 0.9 + spread
    entropy = -math.fsum(share * math.log(share) for share in p.values()) / math.log(V)
    heat = low + (high - low) * entropy**exponent
    left = given(values, "temperature", temperature=0.9, dynatemp_range=spread, dynatemp_exponent=exponent)
    expected = softmax({id: value / heat for id, value in values.items()})
    assert softmax(left) == pytest.approx(expected, rel=1e-9, abs=1e-300)
    flat = given(dict.fromkeys(range(V), 1.0), "temperature", temperature=0.0, dynatemp_range=spread)
    assert flat.keys() == {0}, "temperature 0 is greedy, and the first of equal tokens is the likeliest"


def test_penalties_see_the_last_tokens_only() -> None:
    values, prompt, output = logits(3), [5, 6, 7], [8, 8, 9]
    asked = {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.2}

    def expected(seen: list[int], counted: list[int]) -> Logits:
        changed = dict(values)
        for id in set(seen):
            changed[id] = values[id] / 1.5 if values[id] > 0 else values[id] * 1.5
            changed[id] -= 0.3 * counted.count(id) + 0.2 * (id in counted)
        return changed

    for window, seen, counted in [(4, [7, 8, 8, 9], [7, 8, 8, 9]), (-1, prompt + output, output), (0, [], [])]:
        left = given(values, "penalties", prompt=prompt, output=output, repeat_last_n=window, **asked)
        assert left == pytest.approx(expected(seen, counted), rel=1e-12)


def dry_penalties(tokens: list[int], window: int, least: int, breakers: dict[int, Any]) -> Logits:
    """The longest repetition that each token would continue, found by comparing every end with every other."""
    tokens = tokens[-window:] if window > 0 else tokens
    limit = len(tokens)
    for begin in range(len(tokens) - 1, -1, -1):
        lengths = [
            len(tail) for tail in breakers.get(tokens[begin], ()) if tokens[begin + 1 :][: len(tail)] == list(tail)
        ]
        if lengths:
            limit = len(tokens) - 1 - begin - max(lengths)
            break
    found: Logits = {}
    for end in range(1, len(tokens)):
        length = 0
        while length < min(end, limit) and tokens[end - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= least:
            found[tokens[end]] = max(found.get(tokens[end], 0.0), 0.8 * 1.75 ** (length - least))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_dry_penalizes_tokens_that_continue_a_repetition(seed: int) -> None:
    draw, values = random.Random(seed), logits(seed)
    tokens = [draw.randrange(1 + seed % 4) for _ in range(draw.randrange(2, 60))]
    window, least = draw.choice([-1, 5, 20]), draw.choice([1, 2, 4])
    breakers = draw.choice([{}, {0: ((),)}, {1: ((2,), (0, 0), (3, 1, 2))}])
    left = given(
        values, "dry", prompt=tokens[:3], output=tokens[3:], dry_multiplier=0.8, dry_allowed_length=least,
        dry_penalty_last_n=window, dry_breakers=breakers,
    )  # fmt: skip
    penalties = dry_penalties(tokens, window, least, breakers)
    assert left == pytest.approx({id: value - penalties.get(id, 0.0) for id, value in values.items()}, rel=1e-12)


def test_dry_stays_finite_in_the_longest_repetition() -> None:
    left = given(
        logits(1), ("dry", "temperature"), output=[4] * 3000, dry_multiplier=1e6, dry_base=1e6, temperature=1e-30
    )
    assert all(math.isfinite(value) for value in left.values()) and left[4] == min(left.values())


@pytest.mark.parametrize("mu", [0.5, 2.0, 4.0, 9.0])
def test_mirostat_bounds_the_surprise(mu: float) -> None:
    values = logits(4)
    order, p = likeliest(values), softmax(values)
    second = {id for id in p if -math.log2(p[id]) <= mu} or {order[0]}
    assert given(values, (), mirostat=2, mu=mu).keys() == second
    t = [math.log((at + 2) / (at + 1)) for at in range(V - 1)]
    b = [math.log(p[one] / p[other]) for one, other in pairwise(order)]
    s = math.fsum(x * y for x, y in zip(t, b, strict=True)) / math.fsum(x * x for x in t)
    k = ((s - 1) * 2**mu / (1 - V ** -(s - 1))) ** (1 / s)
    assert given(values, (), mirostat=1, mu=mu).keys() == set(order[: max(1, int(k))])


def test_mirostat_brings_the_surprise_to_its_target() -> None:
    chain, mu, draw, surprises = SamplerChain((), mirostat=2, mirostat_tau=2.5), 5.0, random.Random(1), []
    for step in range(2000):
        p = softmax(given(logits(step % 7), (), mirostat=2, mu=mu))
        (id,) = draw.choices(list(p), list(p.values()))
        surprises.append(-math.log2(p[id]))
        assert next_mu(mu, p[id], chain) == pytest.approx(mu - 0.1 * (surprises[-1] - 2.5))
        mu = next_mu(mu, p[id], chain)
    assert abs(sum(surprises[200:]) / 1800 - 2.5) < 0.05


def test_samplers_work_in_their_order() -> None:
    values = logits(2)
    asked = {"temperature": 2.5, "top_p": 0.7}
    cold, hot = given(values, ("top_p", "temperature"), **asked), given(values, ("temperature", "top_p"), **asked)
    assert cold.keys() == shortest(likeliest(values), values, 0.7)
    assert hot.keys() == shortest(likeliest(values), {id: value / 2.5 for id, value in values.items()}, 0.7)
    assert len(cold) < len(hot)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_every_sampler_takes_few_candidates(left: int) -> None:
    values = {id: float(id) for id in range(left)}
    kept = given(
        values, SAMPLERS, top_k=3, top_p=0.5, min_p=0.5, temperature=0.5, repetition_penalty=2.0, output=[0, 0, 0],
        dry_multiplier=1.0, top_n_sigma=1.0, typical_p=0.5, xtc_probability=1.0, xtc_threshold=0.1, dynatemp_range=0.2,
        repeat_last_n=2, min_keep=9,
    )  # fmt: skip
    assert bool(kept) == bool(left)
    for version in (1, 2):
        assert bool(given(values, (), mirostat=version, mu=-50.0)) == bool(left)
