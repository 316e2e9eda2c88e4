"""What the worker's own /metrics says before anything has happened."""

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shared.messages import Status, WorkerState
from worker.observability.metrics import Metrics


class Idle:
    def status(self) -> Status:
        return Status(3, 1, "m", "cpu", "float32", WorkerState.READY)


def test_what_may_happen_is_counted_from_zero() -> None:
    """A series that appears as 1 has no rate: its first event would be seen by no alert."""
    text = generate_latest(Metrics("x_").readable(Idle())).decode()
    got = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    labels = {
        "x_request_success_total": ("eos", "stop", "length"),
        "x_request_failed_total": ("aborted", "deadline", "error", "shutdown"),
        "x_rejected_total": ("queue_full", "draining", "context_length_exceeded", "invalid"),
    }
    known = {(name, label) for name, values in labels.items() for label in values}
    assert {series: got.get(series) for series in known} == dict.fromkeys(known, 0)
    assert got["x_worker_epoch",] == 3
