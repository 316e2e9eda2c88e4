"""Runs chains of samplers. Each sampler drops candidate tokens of a row, or changes their logits.

The sampling kernel (worker/ops/sampling/) then draws from the tokens that are left, with the row's own random number.
"""

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.messages.requests import Dry, LongBreaker, SamplerChain, WindowPenalties
from shared.wire import unpack_u32
from worker.ops.sampling.reference import signed_seed, uniform
from worker.scheduler.sequence import MirostatRecord, Row

# The samplers that drop candidate tokens of a row by their probability.
#
# NumPy computes them in float64 on one thread, so the result depends only on the row. If tokens are equally likely,
# the lower id comes first.
#
# No sampler needs all tokens in order: it keeps the first ones of an order. Sorting the whole vocabulary of a large
# model takes ten times as long as finding these (`lowest`, `count_until`), and every request in the step waits for
# it.

FIRST_GUESS = 1024  # how many of the likeliest tokens are sorted at first; four in five rows need no more
ROUNDING = 1e-9  # more than the rounding errors of a sum of probabilities
MOST_EQUAL = 256  # if more neighbours of an order are equal, a stable sort is faster than putting them in order
Mask = NDArray[np.bool_]
Values = NDArray[np.float64]


class Candidates(NamedTuple):
    """The candidate tokens that are left of a row, in ascending order of their ids."""

    ids: NDArray[np.int64]  # [N]
    logits: NDArray[np.float64]  # [N], finite

    def keep(self, mask: Mask) -> "Candidates":
        return Candidates(self.ids[mask], self.logits[mask])

    def first(self, keys: Values, count: int) -> "Candidates":
        """Keeps the `count` tokens with the lowest keys [N]; of tokens with equal keys, those with lower ids."""
        return self if count >= len(self.ids) else self.keep(lowest(keys, count))


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(logits - logits.max())
    weights /= weights.sum()
    return weights


def lowest(keys: Values, count: int) -> Mask:
    """Returns a mask [N] of the `count` lowest keys [N]; of equal keys, the earlier ones. count: below N."""
    if count <= 0:
        return np.zeros(len(keys), np.bool_)
    bound = np.partition(keys, count - 1)[count - 1]
    mask: Mask = keys < bound
    mask[np.flatnonzero(keys == bound)[: count - int(mask.sum())]] = True
    return mask


def count_until(keys: Values, shares: Values, p: float, side: Literal["left", "right"]) -> int:
    """Returns how many tokens with the lowest keys it takes until their shares [N] add up to p; N if all have less.

    side: "right" if a sum of exactly p is not enough, else "left". The sums are taken in the order of the keys, and of
    the indices where keys are equal.
    """
    if len(keys) > FIRST_GUESS:
        first = lowest(keys, FIRST_GUESS)
        if shares[first].sum() > p + ROUNDING:
            keys, shares = keys[first], shares[first]
    sums = np.cumsum(shares[ascending(keys)])
    return min(len(keys), int(np.searchsorted(sums, p, side=side)) + 1)


def ascending(keys: Values) -> NDArray[np.int64]:
    """Returns the stable order [N] of the keys. Does the same as a stable argsort, in a third of the time."""
    order = np.argsort(keys)
    in_order = keys[order]
    equal = np.flatnonzero(in_order[1:] == in_order[:-1])
    if len(equal) > MOST_EQUAL:
        return np.argsort(keys, kind="stable")
    for run in np.split(equal, np.flatnonzero(np.diff(equal) > 1) + 1) if len(equal) else ():
        order[run[0] : run[-1] + 2].sort()
    return order


def top_k(left: Candidates, k: int) -> Candidates:
    """Keeps the k likeliest tokens."""
    return left if k <= 0 else left.first(-left.logits, k)


def top_p(left: Candidates, p: float, min_keep: int) -> Candidates:
    """Keeps the smallest set of likeliest tokens with total probability p (Holtzman et al., arXiv:1904.09751)."""
    if p >= 1:
        return left
    shares = softmax(left.logits)
    return left.first(-shares, max(count_until(-shares, shares, p, "left"), min_keep))


def min_p(left: Candidates, p: float, min_keep: int) -> Candidates:
    """Keeps the tokens that are at least p times as likely as the likeliest (Nguyen et al., arXiv:2407.01082)."""
    if p <= 0:
        return left
    mask = left.logits >= left.logits.max() + np.log(p)
    return left.keep(mask) if mask.sum() >= min_keep else left.first(-left.logits, max(1, min_keep))


def typical(left: Candidates, p: float, min_keep: int) -> Candidates:
    """Keeps the tokens with information nearest to the entropy, until probabilities add up to p (arXiv:2202.00666)."""
    if p >= 1:
        return left
    shares = softmax(left.logits)
    information = -np.log(np.maximum(shares, np.finfo(float).tiny))
    distance = np.abs(information - (shares * information).sum())
    return left.first(distance, max(count_until(distance, shares, p, "right"), min_keep))


def top_n_sigma(left: Candidates, n: float) -> Candidates:
    """Keeps the tokens whose logits are within n standard deviations of the highest (arXiv:2411.07641)."""
    return left if n <= 0 else left.keep(left.logits >= left.logits.max() - n * left.logits.std())


def xtc(left: Candidates, threshold: float, min_keep: int) -> Candidates:
    """XTC ("exclude top choices"): drops all tokens with probability >= threshold, except the least likely of these."""
    shares = softmax(left.logits)
    dropped = int((shares >= threshold).sum()) - 1
    if dropped <= 0 or len(shares) - dropped < min_keep:
        return left
    return left.keep(~lowest(-shares, dropped))


def entropy_share(left: Candidates) -> float:
    """Returns the entropy of the tokens as a share of the highest possible entropy."""
    shares = softmax(left.logits)
    entropy = -(shares * np.log(np.maximum(shares, np.finfo(float).tiny))).sum()
    return float(entropy / np.log(len(shares)))


XTC_STREAM = 0x58_54_43  # mixed into the seed, so that XTC's random number is independent of the draw's
NOT_CANDIDATE = -np.inf


def chained(logits: Tensor, rows: list[Row], progress: Callable[[], None] = lambda: None) -> Tensor:
    """Returns the logits [R, V] float32 after the chain of each row that has one. Dropped tokens get -inf.

    Waits for the device. Notes in each sequence how long its row took. progress: called after each row
    """
    result = logits.clone()
    for place, row in enumerate(rows):
        if (chain := row[0].sampling.chain) is not None:
            began = time.perf_counter()
            values = logits[place].float().cpu().numpy()
            run = run_chain if row[0].mirostat is None else partial(_run_mirostat, row)
            result[place] = torch.from_numpy(run(values, chain, _tokens_before(row), _chance(row)))
            if (host := row[0].host) is not None:
                host.chain, host.chained = time.perf_counter() - began, True
            progress()
    return result


def run_chain(
    logits: NDArray[np.float32], chain: SamplerChain, tokens: NDArray[np.int64], chance: float
) -> NDArray[np.float32]:
    """Returns the logits [V] of one row after its chain. A row without finite logits is returned as it is.

    tokens: prompt and output before this row; chance: a random number in (0, 1), for XTC.
    """
    finite = np.flatnonzero(np.isfinite(logits))
    if not len(finite):
        return logits
    left = Candidates(finite, logits[finite].astype(np.float64))
    for name in chain.order:
        left = _step(name, left, chain, tokens, chance)
    result = np.full_like(logits, NOT_CANDIDATE)
    result[left.ids] = left.logits
    return result


def _run_mirostat(
    row: Row, logits: NDArray[np.float32], chain: SamplerChain, tokens: NDArray[np.int64], chance: float
) -> NDArray[np.float32]:
    """Does the same as run_chain, and then Mirostat. While known output is replayed, only the known id is left."""

    sequence, output, _ = row
    record, before = sequence.mirostat, tokens[sequence.prompt_len :].tolist()
    assert record is not None
    mu, result = bound(record, chain, before), run_chain(logits, chain, tokens, chance)
    finite = np.flatnonzero(np.isfinite(result))
    if len(finite):
        left = Candidates(finite, result[finite].astype(np.float64))
        left = bounded(left, chain.mirostat, mu, len(logits))
        keep_shares(record, left)
        result = np.full_like(logits, NOT_CANDIDATE)
        result[left.ids] = left.logits
    if output < len(record.forced):
        result = np.full_like(logits, NOT_CANDIDATE)
        result[record.forced[output]] = 0.0
    return result


def _step(name: str, left: Candidates, chain: SamplerChain, tokens: NDArray[np.int64], chance: float) -> Candidates:
    match name:
        case "penalties":
            return left if chain.penalties is None else penalize(left, tokens, chain.penalties)
        case "dry":
            return left if chain.dry is None else dry(left, tokens, chain.dry)
        case "top_n_sigma":
            return top_n_sigma(left, chain.top_n_sigma)
        case "top_k":
            return top_k(left, chain.top_k)
        case "typ_p":
            return typical(left, chain.typical_p, chain.min_keep)
        case "top_p":
            return top_p(left, chain.top_p, chain.min_keep)
        case "min_p":
            return min_p(left, chain.min_p, chain.min_keep)
        case "xtc":
            return xtc(left, chain.xtc_threshold, chain.min_keep) if chance < chain.xtc_probability else left
        case "temperature":
            return _temper(left, chain)
    return left


def _temper(left: Candidates, chain: SamplerChain) -> Candidates:
    """Divides the logits by the temperature, which may depend on the entropy (llama.cpp's dynamic temperature)."""
    temperature = chain.temperature
    if chain.dynatemp_range > 0 and len(left.ids) > 1:
        low, high = max(0.0, temperature - chain.dynatemp_range), temperature + chain.dynatemp_range
        temperature = low + (high - low) * entropy_share(left) ** chain.dynatemp_exponent
    if temperature <= 0:
        return top_k(left, 1)
    return Candidates(left.ids, (left.logits - left.logits.max()) / temperature)


def _tokens_before(row: Row) -> NDArray[np.int64]:
    """Returns the tokens before a row: prompt, output and drafts."""
    sequence, _, ahead = row
    return np.array([*sequence.tokens, *ahead], np.int64)


def _chance(row: Row) -> float:
    sequence, output, _ = row
    seeds, positions = torch.tensor([signed_seed(sequence.seed ^ XTC_STREAM)]), torch.tensor([output])
    return float(uniform(seeds, positions)[0])


# Mirostat (Basu et al., arXiv:2007.14966): drops tokens so that the surprise of the output stays near a target.
#
# Its bound mu depends on how surprising each output token so far was. The record of the sequence has mu for every
# output position, so a step that is repeated computes the same result again.

ESTIMATED_FROM = 100  # Zipf's exponent is estimated from this many likeliest tokens, as in the paper's algorithm 1


def bounded(left: Candidates, version: int, mu: float, vocab_size: int) -> Candidates:
    """Keeps the tokens that Mirostat 1 or 2 allows at a bound of `mu` bits, at least the likeliest token."""
    return _by_zipf(left, mu, vocab_size) if version == 1 else _by_surprise(left, mu)


def _by_zipf(left: Candidates, mu: float, vocab_size: int) -> Candidates:
    """Mirostat 1: keeps as many tokens as make the expected surprise mu, if probabilities follow Zipf's law."""
    shares = np.maximum(_likeliest(left, ESTIMATED_FROM), np.finfo(float).tiny)
    if len(shares) < 2:
        return left
    places = np.arange(1.0, len(shares))
    t, b = np.log((places + 1) / places), np.log(shares[:-1] / shares[1:])
    exponent = (t * b).sum() / (t * t).sum()
    with np.errstate(all="ignore"):  # divides by 0 if all tokens are equally likely
        epsilon = exponent - 1
        count = (epsilon * np.exp2(mu) / (1 - np.float64(vocab_size) ** -epsilon)) ** (1 / exponent)
    return left.first(-left.logits, int(min(max(count, 1.0), len(left.ids)))) if np.isfinite(count) else left


def _likeliest(left: Candidates, count: int) -> NDArray[np.float64]:
    """Returns the probabilities of the `count` likeliest tokens, in descending order of their logits."""
    shares, logits = softmax(left.logits), left.logits
    if count < len(logits):
        mask = lowest(-logits, count)
        shares, logits = shares[mask], logits[mask]
    return shares[np.argsort(-logits, kind="stable")]


def _by_surprise(left: Candidates, mu: float) -> Candidates:
    """Mirostat 2: keeps the tokens whose surprise is at most mu."""
    mask = -np.log2(np.maximum(softmax(left.logits), np.finfo(float).tiny)) <= mu
    return left.keep(mask) if mask.any() else left.first(-left.logits, 1)


def bound(record: MirostatRecord, chain: SamplerChain, output: list[int]) -> float:
    """Returns mu for the token after `output`. If the last token was not among the candidates, mu stays the same."""
    place = len(output)
    del record.bounds[place + 1 :]  # remove bounds of a step that is now repeated
    if place == len(record.bounds):
        mu, share = record.bounds[-1], record.share(output[-1])
        record.bounds.append(mu if share is None else next_bound(mu, share, chain))
    return record.bounds[place]


def next_bound(mu: float, share: float, chain: SamplerChain) -> float:
    """Returns mu after a token. share: the probability that the token was drawn with."""
    surprise = -float(np.log2(max(share, np.finfo(float).tiny)))
    return mu - chain.mirostat_eta * (surprise - chain.mirostat_tau)


def keep_shares(record: MirostatRecord, left: Candidates) -> None:
    """Stores the probabilities that a token is drawn from, from which bound() later computes its surprise."""
    record.ids, record.shares = array("I"), array("d")
    record.ids.frombytes(left.ids.astype(np.uint32).tobytes())
    record.shares.frombytes(softmax(left.logits).tobytes())


# The samplers that look at earlier tokens: penalties in a window, and DRY.

MAX_MATCH = 512  # longer repetitions count as this long, to bound the time of a step
MAX_TAIL = 64  # the maximum number of ids of a breaker after its first id
MAX_LOG = 88.7  # the logarithm of the largest float32: larger penalties are capped
Tokens = NDArray[np.int64]


def window(tokens: Tokens, last_n: int) -> Tokens:
    return tokens if last_n < 0 else tokens[max(0, len(tokens) - last_n) :]


def penalize(left: Candidates, tokens: Tokens, by: WindowPenalties) -> Candidates:
    """Applies CTRL's repetition penalty (arXiv:1909.05858), and OpenAI's frequency and presence penalties.

    The penalties apply to all tokens in the window of the last `by.last_n` tokens.
    """
    ids, counts = np.unique(window(tokens, by.last_n), return_counts=True)
    places, logits = _places(left, ids), left.logits.copy()
    found = places >= 0
    at, value = places[found], logits[places[found]]
    value = np.where(value > 0, value / by.repetition, value * by.repetition)
    logits[at] = value - by.frequency * counts[found] - by.presence
    return Candidates(left.ids, logits)


def dry(left: Candidates, tokens: Tokens, by: Dry) -> Candidates:
    """Subtracts multiplier * base^(n - allowed_length) from the logit of a token that extends a repetition of n tokens.

    A repetition is the longest end of the text that occurs earlier in the window, followed there by the token. It does
    not go back beyond the last breaker.
    """
    seen = window(tokens, by.last_n)
    longest = min(_since_breaker(seen, by), MAX_MATCH)
    if longest < by.allowed_length or longest < 1:
        return left
    repeated = _repetitions(seen, longest)
    found = {token: length for token, length in repeated.items() if length >= by.allowed_length}
    ids = np.array(sorted(found), np.int64)
    places, logits = _places(left, ids), left.logits.copy()
    for id, place in zip(ids.tolist(), places.tolist(), strict=True):
        if place >= 0:
            logits[place] -= by.multiplier * _power(by.base, found[id] - by.allowed_length)
    return Candidates(left.ids, logits)


def _power(base: float, exponent: int) -> float:
    most = MAX_LOG / np.log(base) if base > 1.000001 else exponent
    return float(base ** min(exponent, most))


def _repetitions(seen: Tokens, longest: int) -> dict[int, int]:
    """Returns a map from each token that would extend a repetition to the repetition's length, at most `longest`.

    For each earlier occurrence of the last token, it compares the tokens before that place with the end of the text.
    """
    last, found = len(seen) - 1, dict[int, int]()
    places = np.flatnonzero(seen[:last] == seen[last])
    length = 1
    while len(places):
        found.update(dict.fromkeys(seen[places + 1].tolist(), length))
        if length == longest:
            break
        places = places[places >= length]
        places = places[seen[places - length] == seen[last - length]]
        length += 1
    return found


def _since_breaker(seen: Tokens, by: Dry) -> int:
    """Returns how many tokens follow the last breaker in the text; the length of the text if there is no breaker.

    It looks only at the last MAX_MATCH + MAX_TAIL tokens, because a repetition is not longer.
    """
    recent = seen[::-1][: MAX_MATCH + MAX_TAIL]
    single = np.flatnonzero(_among(recent, np.frombuffer(by.breakers, "<u4")))
    end = int(single[0]) if len(single) else len(recent)
    tails_after, reverse = _tails_by_head(by.long_breakers), recent.tolist()
    for behind, token in enumerate(reverse[: end + 1]) if tails_after else ():
        tails = [tail for tail in tails_after.get(token, ()) if _follows(tail, reverse, behind)]
        if tails:
            return behind - max(map(len, tails))
    return end if len(single) else len(seen)


@lru_cache(maxsize=8)
def _tails_by_head(breakers: tuple[LongBreaker, ...]) -> Mapping[int, Sequence[Sequence[int]]]:
    """Returns a map: first id of a breaker → the ids that must follow it. Cached, because each step needs it."""
    after: dict[int, list[Sequence[int]]] = {}
    for one in breakers:
        for head in unpack_u32(one.heads):
            after.setdefault(head, []).append(one.tail)
    return after


def _follows(tail: Sequence[int], reverse: Sequence[int], behind: int) -> bool:
    return len(tail) <= behind and all(id == reverse[behind - 1 - at] for at, id in enumerate(tail))


def _among(tokens: Tokens, ids: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Returns for each of the tokens [N] whether it is in ids [K], which are sorted in ascending order."""
    if not len(ids):
        return np.zeros(len(tokens), np.bool_)
    at = np.searchsorted(ids, tokens)
    found: NDArray[np.bool_] = ids[np.minimum(at, len(ids) - 1)] == tokens
    return found


def _places(left: Candidates, ids: Tokens) -> NDArray[np.int64]:
    """Returns [K]: the index of each of the K ids among the candidates; -1 for an id that is not a candidate."""
    if not len(ids):
        return np.zeros(0, np.int64)
    at = np.searchsorted(left.ids, ids)
    known = left.ids[np.minimum(at, len(left.ids) - 1)] == ids
    return np.where(known, at, -1)
