"""The Status of a worker that is still loading."""

from shared.config.settings import Settings
from shared.heartbeat import Heartbeat
from worker.engine.status import StatusReporter


def test_status_distinguishes_download_from_load() -> None:
    state = StatusReporter(Settings(), 1, Heartbeat())
    state.on_download(30, 100)
    assert (state.status().state, state.status().progress, state.heartbeat.progress_count) == ("downloading", 0.3, 1)
    state.on_load(0, 10)
    assert (state.status().state, state.status().progress) == ("loading", 0.0)
