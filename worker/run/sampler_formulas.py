"""llama.cpp's samplers: what each of them does to the candidates of one row, in float64.

The definitions are llama.cpp's, by its names (tools/server/README.md there); each function names the paper it stands
for. NumPy computes them on the host with one thread, so a sum does not depend on the number of threads. Candidates are
in the order of their ids; where an order of likelihood is needed, equal logits are ordered by id.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.messages import SamplerChain, Sampling

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

MIROSTAT_TOKENS = 100  # how many of the likeliest tokens Mirostat 1 estimates the exponent of Zipf's law from
MOST_LOG = 88.0  # of a DRY penalty, so that it fits float32
FAR = -1e30  # a logit that is never drawn and fits float32


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that may still be drawn."""

    ids: Ids  # [C], rising
    logits: Floats  # [C], finite

    @property
    def probabilities(self) -> Floats:
        """Returns the softmax [C]."""
        weights: Floats = np.exp(self.logits - self.logits.max())
        shares: Floats = weights / weights.sum()
        return shares

    @property
    def ranking(self) -> Ids:
        """Returns the places [C] of the candidates, the likeliest first."""
        return np.argsort(-self.logits, kind="stable")

    def only(self, places: Ids | NDArray[np.bool_]) -> "Candidates":
        """Returns the candidates at these places, which are a mask or in any order."""
        kept = np.flatnonzero(places) if places.dtype == np.bool_ else np.sort(places)
        return Candidates(self.ids[kept], self.logits[kept])


@dataclass(frozen=True, slots=True)
class Row:
    """What a row knows besides its logits.

    prompt, output: the tokens before it; draw: in (0, 1), of XTC; mu: Mirostat's bound on the surprise, in bits
    """

    sampling: Sampling
    chain: SamplerChain
    prompt: list[int]
    output: list[int]
    vocab_size: int
    draw: float = 0.5
    mu: float = 0.0


def apply_chain(logits: NDArray[np.float32], row: Row) -> Candidates:
    """Applies the samplers of a row in their order, then Mirostat: logits [V], -inf where a token is forbidden.

    The next token is to be drawn from the softmax of the result.
    """
    places = np.flatnonzero(np.isfinite(logits))
    left = Candidates(places, logits[places].astype(np.float64))
    if not len(places):
        return left
    for name in row.chain.order:
        left = SAMPLERS[name](left, row)
    return MIROSTATS[row.chain.mirostat](left, row) if row.chain.mirostat else left


def next_mu(mu: float, probability: float, chain: SamplerChain) -> float:
    """Returns Mirostat's bound after a token that was drawn with a probability (arXiv:2007.14966, algorithms 1, 2)."""
    surprise = -np.log2(max(probability, np.finfo(np.float64).tiny))
    return float(mu - chain.mirostat_eta * (surprise - chain.mirostat_tau))


def penalties(left: Candidates, row: Row) -> Candidates:
    """The penalties of kernels/sample.py, or llama.cpp's, which see only the last `repeat_last_n` tokens."""
    sampling, window = row.sampling, row.chain.repeat_last_n
    if not sampling.penalized or not window:
        return left
    everything = [*row.prompt, *row.output]
    seen, counted = (everything, row.output) if window < 0 else (everything[-window:], everything[-window:])
    width = row.vocab_size
    occurs = np.bincount(np.array(seen, np.int64), minlength=width)[left.ids] > 0
    counts = np.bincount(np.array(counted, np.int64), minlength=width)[left.ids]
    factor, logits = sampling.repetition_penalty, left.logits
    logits = np.where(occurs, np.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    return Candidates(left.ids, logits)


def dry(left: Candidates, row: Row) -> Candidates:
    """DRY ("don't repeat yourself"): penalizes tokens that would continue a repetition, more for a longer one."""
    chain = row.chain
    if not chain.dry_multiplier or not chain.dry_penalty_last_n:
        return left
    tokens = [*row.prompt, *row.output]
    if chain.dry_penalty_last_n > 0:
        tokens = tokens[-chain.dry_penalty_last_n :]
    limit = _since_breaker(tokens, chain.dry_breakers)
    if limit < chain.dry_allowed_length:
        return left
    lengths: dict[int, int] = {}
    for end, length in enumerate(_suffix_lengths(tokens, limit)):
        if length >= chain.dry_allowed_length:
            lengths[tokens[end + 1]] = max(length, lengths.get(tokens[end + 1], 0))
    if not lengths:
        return left
    logits, longest = left.logits.copy(), np.zeros(row.vocab_size, np.int64) - 1
    longest[list(lengths)] = list(lengths.values())
    repeats = longest[left.ids]
    exponents = np.maximum(repeats - chain.dry_allowed_length, 0).astype(np.float64)
    if chain.dry_base > 1:
        exponents = np.minimum(exponents, MOST_LOG / np.log(chain.dry_base))
    logits[repeats >= 0] -= (chain.dry_multiplier * chain.dry_base**exponents)[repeats >= 0]
    return Candidates(left.ids, np.maximum(logits, FAR))


def _since_breaker(tokens: list[int], breakers: Mapping[int, tuple[tuple[int, ...], ...]]) -> int:
    """Returns how many tokens follow the last sequence breaker. breakers: by first token, the tokens that follow it."""
    for back in range(len(tokens)):
        begin = len(tokens) - 1 - back
        tails = [
            len(tail)
            for tail in breakers.get(tokens[begin], ())
            if len(tail) <= back and tuple(tokens[begin + 1 : begin + 1 + len(tail)]) == tail
        ]
        if tails:
            return back - max(tails)
    return len(tokens)


def _suffix_lengths(tokens: list[int], limit: int) -> list[int]:
    """Returns for each token but the last how many tokens up to it equal the last tokens, at most `limit`.

    This is the Z-algorithm on the reversed tokens, which takes linear time.
    """
    text = tokens[::-1]
    size = len(text)
    lengths = [0] * size
    left = right = 0
    for at in range(1, size):
        length = min(right - at, lengths[at - left]) if at < right else 0
        while at + length < size and text[length] == text[at + length]:
            length += 1
        if at + length > right:
            left, right = at, at + length
        lengths[at] = length
    return [min(length, limit) for length in lengths[:0:-1]]


def top_n_sigma(left: Candidates, row: Row) -> Candidates:
    """Keeps the logits that are at most so many standard deviations below the highest (arXiv:2411.07641)."""
    if row.chain.top_n_sigma <= 0 or len(left.ids) < 2:
        return left
    return left.only(left.logits >= left.logits.max() - row.chain.top_n_sigma * left.logits.std())


def top_k(left: Candidates, row: Row) -> Candidates:
    """Keeps the likeliest tokens."""
    count = row.sampling.top_k
    return left.only(left.ranking[:count]) if 0 < count < len(left.ids) else left


def typ_p(left: Candidates, row: Row) -> Candidates:
    """Keeps the tokens whose surprise is nearest to the expected one (arXiv:2202.00666)."""
    if row.chain.typical_p >= 1:
        return left
    p = left.probabilities
    surprise = -np.log(np.maximum(p, np.finfo(np.float64).tiny))
    order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
    enough = np.cumsum(p[order]) > row.chain.typical_p
    return left.only(order[: _first(enough, row.chain.min_keep)])


def top_p(left: Candidates, row: Row) -> Candidates:
    """Keeps the fewest of the likeliest tokens that together have this probability (arXiv:1904.09751)."""
    if row.sampling.top_p >= 1:
        return left
    order = left.ranking
    enough = np.cumsum(left.probabilities[order]) >= row.sampling.top_p
    return left.only(order[: _first(enough, row.chain.min_keep)])


def min_p(left: Candidates, row: Row) -> Candidates:
    """Keeps the tokens that are at least this share as likely as the likeliest (arXiv:2407.01082)."""
    if row.sampling.min_p <= 0:
        return left
    kept = left.logits >= left.logits.max() + np.log(row.sampling.min_p)
    return left.only(kept) if kept.sum() >= row.chain.min_keep else left.only(left.ranking[: row.chain.min_keep])


def xtc(left: Candidates, row: Row) -> Candidates:
    """XTC ("exclude top choices"): now and then drops all tokens above a threshold but the least likely of them."""
    chain = row.chain
    if chain.xtc_probability <= 0 or chain.xtc_threshold > 0.5 or len(left.ids) < 2 or row.draw > chain.xtc_probability:
        return left
    order = left.ranking
    dropped = int((left.probabilities >= chain.xtc_threshold).sum()) - 1
    return left.only(order[dropped:]) if dropped > 0 and len(order) - dropped >= chain.min_keep else left


def temperature(left: Candidates, row: Row) -> Candidates:
    """Divides the logits by the temperature, or by one that follows their entropy (`dynatemp_range`).

    Temperature 0 keeps the likeliest token only.
    """
    heat, spread = row.sampling.temperature, row.chain.dynatemp_range
    if heat and spread and len(left.ids) > 1:
        p = left.probabilities
        entropy = -(p * np.log(np.maximum(p, np.finfo(np.float64).tiny))).sum() / np.log(len(p))
        lowest = max(0.0, heat - spread)
        heat = lowest + (heat + spread - lowest) * float(max(entropy, 0.0)) ** row.chain.dynatemp_exponent
    if heat < np.finfo(np.float32).tiny:
        return left.only(left.ranking[:1])
    return Candidates(left.ids, (left.logits - left.logits.max()) / heat)


def _mirostat_1(left: Candidates, row: Row) -> Candidates:
    """Keeps so many tokens that their surprise is expected to be mu, if they follow Zipf's law."""
    order = left.ranking
    p = left.probabilities[order][:MIROSTAT_TOKENS]
    if len(p) < 2:
        return left
    places = np.arange(1.0, len(p))
    t, b = np.log((places + 1) / places), np.log(np.maximum(p[:-1], 1e-300) / np.maximum(p[1:], 1e-300))
    exponent = (t * b).sum() / (t * t).sum()
    epsilon = exponent - 1
    with np.errstate(all="ignore"):
        k = (epsilon * 2.0**row.mu / (1 - float(row.vocab_size) ** -epsilon)) ** (1 / exponent)
    count = len(order) if not np.isfinite(k) else int(min(max(k, 1.0), len(order)))
    return left.only(order[:count])


def _mirostat_2(left: Candidates, row: Row) -> Candidates:
    """Keeps the tokens whose surprise is at most mu, and always the likeliest."""
    with np.errstate(divide="ignore"):
        kept = -np.log2(left.probabilities) <= row.mu
    return left.only(kept) if kept.any() else left.only(left.ranking[:1])


def _first(enough: NDArray[np.bool_], least: int) -> int:
    """Returns how many entries there are up to the first that is enough, but at least `least`."""
    count = int(enough.argmax()) + 1 if enough.any() else len(enough)
    return max(count, least)


SAMPLERS: Mapping[str, Callable[[Candidates, Row], Candidates]] = {
    "penalties": penalties, "dry": dry, "top_n_sigma": top_n_sigma, "top_k": top_k, "typ_p": typ_p, "top_p": top_p,
    "min_p": min_p, "xtc": xtc, "temperature": temperature,
}  # fmt: skip
MIROSTATS: Mapping[int, Callable[[Candidates, Row], Candidates]] = {1: _mirostat_1, 2: _mirostat_2}
