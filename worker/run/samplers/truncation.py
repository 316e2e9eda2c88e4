"""The samplers that drop candidate tokens of a row by their probability.

NumPy computes them in float64 on one thread, so the result depends only on the row. If tokens are equally likely, the
lower id comes first.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


class Candidates(NamedTuple):
    """The candidate tokens that are left of a row, in ascending order of their ids."""

    ids: NDArray[np.int64]  # [N]
    logits: NDArray[np.float64]  # [N], finite

    def keep(self, mask: Mask) -> "Candidates":
        return Candidates(self.ids[mask], self.logits[mask])

    def first(self, order: NDArray[np.int64], count: int) -> "Candidates":
        """Keeps the first `count` tokens of `order` [N], a permutation of the indices of the candidates."""
        mask = np.zeros(len(self.ids), bool)
        mask[order[:count]] = True
        return self.keep(mask)


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(logits - logits.max())
    weights /= weights.sum()
    return weights


def descending(values: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.argsort(-values, kind="stable")


def top_k(left: Candidates, k: int) -> Candidates:
    """Keeps the k likeliest tokens."""
    return left if k <= 0 or k >= len(left.ids) else left.first(descending(left.logits), k)


def top_p(left: Candidates, p: float, min_keep: int) -> Candidates:
    """Keeps the smallest set of likeliest tokens with total probability p (Holtzman et al., arXiv:1904.09751)."""
    if p >= 1:
        return left
    shares = softmax(left.logits)
    order = descending(shares)
    reached = np.cumsum(shares[order])
    return left.first(order, max(int(np.searchsorted(reached, p)) + 1, min_keep))


def min_p(left: Candidates, p: float, min_keep: int) -> Candidates:
    """Keeps the tokens that are at least p times as likely as the likeliest (Nguyen et al., arXiv:2407.01082)."""
    if p <= 0:
        return left
    mask = left.logits >= left.logits.max() + np.log(p)
    return left.keep(mask) if mask.sum() >= min_keep else left.first(descending(left.logits), max(1, min_keep))


def typical(left: Candidates, p: float, min_keep: int) -> Candidates:
    """Keeps the tokens with information nearest to the entropy, until probabilities add up to p (arXiv:2202.00666)."""
    if p >= 1:
        return left
    shares = softmax(left.logits)
    information = -np.log(np.maximum(shares, np.finfo(float).tiny))
    order = np.argsort(np.abs(information - (shares * information).sum()), kind="stable")
    reached = np.cumsum(shares[order])
    return left.first(order, max(int(np.searchsorted(reached, p, side="right")) + 1, min_keep))


def top_n_sigma(left: Candidates, n: float) -> Candidates:
    """Keeps the tokens whose logits are within n standard deviations of the highest (arXiv:2411.07641)."""
    return left if n <= 0 else left.keep(left.logits >= left.logits.max() - n * left.logits.std())


def xtc(left: Candidates, threshold: float, min_keep: int) -> Candidates:
    """XTC ("exclude top choices"): drops all tokens with probability >= threshold, except the least likely of these."""
    shares = softmax(left.logits)
    order = descending(shares)
    dropped = int((shares >= threshold).sum()) - 1
    if dropped <= 0 or len(order) - dropped < min_keep:
        return left
    return left.first(order[::-1], len(order) - dropped)


def entropy_share(left: Candidates) -> float:
    """Returns the entropy of the tokens as a share of the highest possible entropy."""
    shares = softmax(left.logits)
    entropy = -(shares * np.log(np.maximum(shares, np.finfo(float).tiny))).sum()
    return float(entropy / np.log(len(shares)))
