"""Tests of worker/engine/metrics.py."""

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shared.messages import ConnectedFrontend, KVUsage, Outcome, Pages, Sampling, Status, WorkerState
from worker.engine.metrics import Metrics, Source
from worker.scheduler.sequence import RequestStats, Sequence


class Idle:
    def status(self) -> Status:
        return Status(3, 1, "m", "cpu", "float32", WorkerState.READY)


def test_metrics_of_a_new_worker_have_every_label_at_zero() -> None:
    """A series that appears with the value 1 has no rate yet, so no alert would see its first event."""
    text = generate_latest(Metrics("x_").scrape_registry(Idle())).decode()
    got = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    labels = {
        "x_request_failed_total": ("aborted", "deadline", "error", "shutdown"),
        "x_submits_rejected_total": ("queue_full", "draining", "context_length_exceeded", "invalid"),
    }
    known = {(name, label) for name, values in labels.items() for label in values}
    assert {series: got.get(series) for series in known} == dict.fromkeys(known, 0)
    assert got["x_worker_epoch",] == 3


def exported(metrics: Metrics, source: Source) -> dict[tuple[str, ...], float]:
    text = generate_latest(metrics.scrape_registry(source)).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Busy:
    def status(self) -> Status:
        pages = Pages(free=2, cached=3, owned=5, total=10)
        return Status(
            2, 1, "m", "cpu", "float32", WorkerState.READY, running=4, waiting=3, pages=pages, last_step_age_s=0.5,
            kv_cache=(KVUsage("full", 5, 10, 500), KVUsage("window", 6, 8, 300)),
            frontends=(ConnectedFrontend("ab", 1, 1),),
        )  # fmt: skip


def test_gauges_are_those_of_the_status_at_the_scrape() -> None:
    got = exported(Metrics("x_"), Busy())
    assert (got["x_num_requests_running",], got["x_num_requests_waiting",], got["x_frontends",]) == (4, 3, 1)
    assert got["x_kv_cache_usage_perc",] == 0.75, "of the windows"
    assert (got["x_kv_cache_owned_bytes", "full"], got["x_kv_cache_owned_bytes", "window"]) == (500, 300)
    assert got["x_worker_epoch",] == 2
    assert got["x_worker_last_step_age_seconds",] == 0.5


def test_totals_kept_elsewhere_are_counted_once() -> None:
    metrics = Metrics("x_")
    for hits in (5, 5, 9):
        metrics.update_totals({"prefix_cache_hits": hits, "prefix_cache_queries": 2 * hits})
    got = exported(metrics, Idle())
    assert (got["x_prefix_cache_hits_total",], got["x_prefix_cache_queries_total",]) == (9, 18)


def test_loads_of_experts_are_read_at_each_scrape() -> None:
    metrics, loads = Metrics("x_"), {1: [3, 0], 4: [1, 2]}
    assert not any(name.startswith("x_expert_rows") for name, *_ in exported(metrics, Idle()))
    metrics = Metrics("x_")
    metrics.expert_loads = lambda: loads
    registry = metrics.scrape_registry(Idle())

    def scraped() -> list[float | None]:
        list(registry.collect())
        generate_latest(registry)
        return [
            registry.get_sample_value("x_expert_rows_total", {"layer": str(layer), "expert": str(expert)})
            for layer in loads
            for expert in range(2)
        ]

    assert scraped() == [3, 0, 1, 2]
    loads[4] = [5, 2]
    assert scraped() == [3, 0, 5, 2]


def ended(metrics: Metrics, outcome: Outcome, first_token: float) -> None:
    sequence = Sequence((b"f", 1), [1, 2], 1, Sampling(8), 0, history=RequestStats(1.0, 1.1, first_token))
    metrics.ended(outcome, sequence, now=2.0)


def test_times_of_a_sequence_are_observed_however_it_ended_once_it_had_a_token() -> None:
    metrics = Metrics("x_")
    ended(metrics, Outcome.EOS, first_token=1.3)
    ended(metrics, Outcome.ABORTED, first_token=1.3)
    ended(metrics, Outcome.ERROR, first_token=0.0)
    got = exported(metrics, Idle())
    sums = [got[f"x_request_{phase}_time_seconds_sum",] for phase in ("queue", "prefill", "decode")]
    assert [round(seconds, 6) for seconds in sums] == [0.2, 0.4, 1.4]
    assert got["x_request_queue_time_seconds_count",] == 2
    assert got["x_request_failed_total", "aborted"] == got["x_request_failed_total", "error"] == 1
