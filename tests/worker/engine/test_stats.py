"""Tests of worker/engine/metrics.py."""

from worker.engine.metrics import SAMPLES, WINDOW_S, BusyRate, Rate, Recent, quantile


def test_rate_covers_the_last_window_only() -> None:
    rate = Rate()
    rate.add(0.0, 100)
    rate.add(WINDOW_S, 50)
    assert rate.total(WINDOW_S) == 150
    assert rate.total(WINDOW_S + 1.0) == 50 and rate.per_second(WINDOW_S + 1.0) == 5.0


def test_busy_rate_ignores_idle_time() -> None:
    rate = BusyRate()
    assert rate.per_second() == 0.0
    rate.busy(0.0)
    rate.add(2.0, 20)
    rate.idle()
    rate.busy(1000.0)
    rate.busy(1000.5)  # no effect: the worker is busy already
    rate.add(1002.0, 20)
    assert rate.per_second() == 10.0


def test_quantiles_are_those_of_the_latest_samples() -> None:
    recent = Recent()
    assert recent.quantiles().p99 == 0.0
    for value in (1000.0, *(float(i) for i in range(1, SAMPLES + 1))):
        recent.add(value)
    assert recent.quantiles().p50 == SAMPLES / 2
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.95) == 4.0
