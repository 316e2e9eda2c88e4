"""The first tokens of an order, found without sorting all: the same as those of a sorted list, also among equals."""

import numpy as np
import pytest

from worker.model_runner.sampler_chain import FIRST_GUESS, ascending, count_until, lowest, softmax

RNG = np.random.default_rng(5)
KEYS = {
    "different": RNG.normal(size=5000),
    "few values": np.round(RNG.normal(size=5000), 1),
    "equal": np.zeros(5000),
    "short": RNG.normal(size=FIRST_GUESS),
    "one": np.array([0.5]),
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_orders_and_counts_are_those_of_a_stable_sort(keys: np.ndarray) -> None:
    order = np.argsort(keys, kind="stable")
    assert (ascending(keys) == order).all()
    for count in {0, 1, len(keys) // 3, len(keys) - 1}:
        assert (np.flatnonzero(lowest(keys, count)) == np.sort(order[:count])).all()
    shares = softmax(-3 * keys)
    sums = np.cumsum(shares[order])
    for p in (0.0, 1e-9, float(sums[len(sums) // 2]), 0.5, 0.9, 0.999999, 1.0):
        for side in ("left", "right"):
            expected = min(len(keys), int(np.searchsorted(sums, p, side=side)) + 1)  # type: ignore[call-overload]
            assert count_until(keys, shares, p, side) == expected  # type: ignore[arg-type]
