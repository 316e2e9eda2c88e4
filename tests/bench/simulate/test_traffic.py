"""Traffic: synthetic requests, faster ones, and workloads that cannot be replayed."""

import pytest

from bench.simulate.traffic import Synthetic, Traffic
from tests.bench.simulate.harness import traffic


def test_synthetic_traffic_has_the_given_rate_and_lengths() -> None:
    synthetic = Synthetic(rate=50, duration=20, prompt=(3, 9), output=(1, 4), seed=7)
    result = synthetic.make()
    assert result == synthetic.make()
    assert result != Synthetic(rate=50, duration=20, prompt=(3, 9), output=(1, 4)).make()
    assert 800 < len(result.arrivals) < 1200
    assert {len(one.prompt) for one in result.arrivals} == set(range(3, 10))
    assert {one.max_tokens for one in result.arrivals} == set(range(1, 5))
    assert all(0 < a.at < b.at < 20 for a, b in zip(result.arrivals, result.arrivals[1:], strict=False))


def test_faster_traffic_is_the_same_in_less_time() -> None:
    faster = traffic((2, 4, 1), (8, 4, 1)).faster(4)
    assert [one.at for one in faster.arrivals] == [0.5, 2]


def test_traffic_with_a_text_prompt_raises() -> None:
    class TextRequest:
        at, prompt, max_tokens = 0.0, "Once upon a time", 4

    with pytest.raises(ValueError, match="ids"):
        Traffic.of([TextRequest()])
