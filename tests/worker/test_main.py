"""SIGTERM and SIGINT in a worker, while it loads and while it serves."""

import signal
from collections.abc import Iterator

import pytest

from worker.__main__ import StopSignal

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield StopSignal.install()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_while_loading_exits_with_code_0(stop: StopSignal, number: signal.Signals) -> None:
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(number)
    assert ended.value.code == 0


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_while_serving_sets_requested(stop: StopSignal, number: signal.Signals) -> None:
    stop.serving = True
    signal.raise_signal(number)
    assert stop.requested
