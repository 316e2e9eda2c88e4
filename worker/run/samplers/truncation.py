"""The samplers that drop candidate tokens of a row by their probability.

NumPy computes them in float64 on one thread, so the result depends only on the row. If tokens are equally likely, the
lower id comes first.

No sampler needs all tokens in order: it keeps the first ones of an order. Sorting the whole vocabulary of a large model
takes ten times as long as finding these (`lowest`, `count_until`), and every request in the step waits for it.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
