"""shared/metrics_page.py: undocumented parts of prometheus-client still work as we use them."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest, values

from shared.metrics_page import BulkHistogram, declared_labels, name_process
from tests.versions import PINNED

CHECKED_WITH = "0.26.0"


def test_pinned_version_is_the_one_that_was_checked() -> None:
    """If this fails, read the new version's Histogram, CollectorRegistry and values, and then raise CHECKED_WITH."""
    assert PINNED["prometheus_client"] == CHECKED_WITH


def test_many_observations_at_once_give_the_page_of_one_by_one() -> None:
    one_by_one, at_once = CollectorRegistry(), CollectorRegistry()
    histogram = BulkHistogram("seconds", "How long.", registry=one_by_one, buckets=(1, 2))
    for value in (0.5, 1.5, 1.5, 7.0):
        histogram.observe(value)
    BulkHistogram("seconds", "How long.", registry=at_once, buckets=(1, 2)).add([1, 2, 1], 10.5)
    pages = [
        [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
        for registry in (one_by_one, at_once)
    ]
    assert pages[0] == pages[1] and "seconds_sum 10.5" in pages[0]


def test_labels_are_known_before_a_metric_has_samples() -> None:
    registry = CollectorRegistry()
    Counter("refused", "Refusals.", ["reason"], registry=registry)
    assert declared_labels(registry)["refused"] == ("reason",)


def test_named_process_writes_files_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)  # makes monkeypatch restore the value after the test
    name_process("frontend-1")
    values.ValueClass("counter", "refused", "refused_total", (), (), "Refusals.").inc(2)
    assert [file.name for file in tmp_path.iterdir()] == ["counter_frontend-1.db"]
