"""What SIGTERM means to a worker: while it loads, and when it serves."""

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
def test_who_is_still_loading_ends_at_once_and_well(stop: StopSignal, number: signal.Signals) -> None:
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(number)
    assert ended.value.code == 0


@pytest.mark.parametrize("number", SIGNALS)
def test_who_serves_is_told(stop: StopSignal, number: signal.Signals) -> None:
    stop.serving = True
    signal.raise_signal(number)
    assert stop.requested
