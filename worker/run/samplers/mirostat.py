"""Mirostat (Basu et al., arXiv:2007.14966): drops tokens so that the surprise of the output stays near a target.

Its bound mu depends on how surprising each output token so far was. The record of the sequence has mu for every output
position, so a step that is repeated computes the same result again.
"""

from array import array

import numpy as np
from numpy.typing import NDArray

from shared.messages.samplers import SamplerChain
from worker.run.samplers.truncation import Candidates, lowest, softmax
from worker.schedule.records.mirostat import MirostatRecord

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
