"""frontend/observability/metrics.py, in one process and in several."""

import os
import re
import subprocess
import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from deploy.generate import docs_api
from frontend.observability.metrics import PrometheusMetrics
from frontend.request import Finish
from frontend.workers.connection import ConnectionCounters
from frontend.workers.status import ConnectionState, WorkerStatus
from shared.messages import Status
from tests.fakes import READY_STATUS


def samples(text: bytes) -> dict[str, float]:
    return {
        sample.name + "".join(f"|{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def page(metrics: PrometheusMetrics, wire: ConnectionCounters, workers: list[WorkerStatus]) -> bytes:
    """Returns the page /metrics of a frontend with one model, whose pool has these counters and workers."""
    [model] = metrics.models.values()
    model.flush(wire, workers)
    return metrics.text()


def workers(*statuses: Status) -> list[WorkerStatus]:
    return [WorkerStatus(f"w{i}", ConnectionState.READY, "ready", status) for i, status in enumerate(statuses)]


def test_observations_are_exported_under_the_names_of_dashboards() -> None:
    metrics = PrometheusMetrics("x_")
    metrics.models[""].admitted(10)
    metrics.models[""].first_tokens(0.004, 1)
    metrics.models[""].next_tokens(0.03, 3)
    metrics.models[""].finished(Finish.EOS, 2.0)
    metrics.models[""].aborted("client")
    metrics.rejected("queue_full")
    metrics.loop_lag(0.0)
    got = samples(page(metrics, ConnectionCounters(gaps=2, resyncs=3, resumed=4, lost=5), workers(READY_STATUS)))
    assert got["x_prompt_tokens_total"] == 10 and got["x_generation_tokens_total"] == 4
    ttft, itl = "x_time_to_first_token_seconds", "x_inter_token_latency_seconds"
    assert (got[f"{ttft}_bucket|0.005"], got[f"{ttft}_bucket|0.0025"]) == (1, 0)
    assert (got[f"{itl}_count"], got[f"{itl}_bucket|0.01"], got[f"{itl}_bucket|0.005"]) == (3, 3, 0)
    assert abs(got[f"{itl}_sum"] - 0.03) < 1e-9
    assert got["x_e2e_request_latency_seconds_sum"] == 2.0
    assert got["x_request_success_total|eos"] == got["x_aborts_total|client"] == 1
    assert got["x_rejected_total|queue_full"] == 1
    assert got["x_frontend_loop_lag_seconds_count"] == 1
    wire = ("bus_gaps", "resyncs", "streams_resumed", "streams_lost")
    assert [got[f"x_{name}_total"] for name in wire] == [2, 3, 4, 5]


def test_labels_known_beforehand_begin_at_zero() -> None:
    """A series that appears with the value 1 has no rate yet, so no alert would see its first event."""
    [codes] = re.findall(r"^\| 503 \| (.*) \|$", docs_api.codes(), re.MULTILINE)
    refused = {refusal.code for refusal in docs_api.early()} | {"write_timeout"}
    rejected = set(re.findall(r"`(\w+)`", codes)) - refused
    expected = {f"sluice_rejected_total|{code}" for code in rejected}
    expected |= {f"sluice_http_refused_total|{code}" for code in refused}
    expected |= {f"sluice_aborts_total|{why}" for why in ("client", "stop", "deadline_exceeded", "write_timeout")}
    expected |= {f"sluice_request_success_total|{finish}" for finish in ("eos", "stop", "length")}
    got = samples(page(PrometheusMetrics(), ConnectionCounters(), []))
    assert {name: got.get(name) for name in expected} == dict.fromkeys(expected, 0)


def test_observation_at_a_bound_falls_into_its_bucket() -> None:
    metrics = PrometheusMetrics()
    metrics.models[""].first_tokens(0.005, 1)
    assert samples(page(metrics, ConnectionCounters(), []))["sluice_time_to_first_token_seconds_bucket|0.005"] == 1


def test_second_scrape_counts_nothing_twice() -> None:
    metrics = PrometheusMetrics()
    metrics.models[""].first_tokens(0.01, 1)
    wire = ConnectionCounters(gaps=1)
    first = samples(page(metrics, wire, workers(READY_STATUS)))
    assert samples(page(metrics, wire, workers(READY_STATUS))) == first


def test_frontend_without_a_worker_exports_zero_workers() -> None:
    got = samples(page(PrometheusMetrics(), ConnectionCounters(), []))
    assert got["sluice_bus_gaps_total"] == 0
    assert (got["sluice_workers"], got["sluice_workers_ready"]) == (0, 0)


def test_loading_worker_counts_as_known_but_not_ready() -> None:
    loading = WorkerStatus("w2", ConnectionState.LOADING, "loading 15%", READY_STATUS)
    got = samples(page(PrometheusMetrics(), ConnectionCounters(), [*workers(READY_STATUS, READY_STATUS), loading]))
    assert (got["sluice_workers"], got["sluice_workers_ready"]) == (3, 2)


def test_gauges_of_workers_are_left_to_the_workers() -> None:
    names = {
        name.partition("|")[0]
        for name in samples(page(PrometheusMetrics(), ConnectionCounters(), workers(READY_STATUS)))
    }
    assert not names & {
        "sluice_num_requests_running", "sluice_num_requests_waiting", "sluice_kv_cache_usage_perc",
        "sluice_worker_epoch", "sluice_worker_last_step_age_seconds", "sluice_prefix_cache_hits_total",
    }  # fmt: skip


def test_api_keys_beyond_the_limit_share_a_label() -> None:
    metrics = PrometheusMetrics()
    for number in range(300):
        metrics.request_ended(f"name{number}", 2, 3)
    metrics.request_ended("name7", 1, None)
    metrics.request_ended(None, 5, 5)
    text = page(metrics, ConnectionCounters(), []).decode()
    assert 'sluice_key_requests_total{key="name7"} 2.0' in text
    assert 'sluice_key_prompt_tokens_total{key="name7"} 3.0' in text
    assert 'sluice_key_requests_total{key="(others)"} 44.0' in text


def test_models_count_apart_and_what_belongs_to_none_has_the_label_of_the_first() -> None:
    metrics = PrometheusMetrics(names=["a", "b"])
    metrics.models["b"].first_tokens(0.004, 2)
    metrics.models["b"].aborted("of a new kind")
    metrics.rejected("queue_full")
    metrics.models["a"].flush(ConnectionCounters(gaps=1), workers(READY_STATUS))
    metrics.models["b"].flush(ConnectionCounters(gaps=2), [])
    lines = metrics.text().decode().splitlines()
    assert {'sluice_generation_tokens_total{model_name="a"} 0.0', 'sluice_generation_tokens_total{model_name="b"} 2.0',
            'sluice_bus_gaps_total{model_name="a"} 1.0', 'sluice_bus_gaps_total{model_name="b"} 2.0',
            'sluice_workers{model_name="a"} 1.0', 'sluice_workers{model_name="b"} 0.0',
            'sluice_aborts_total{model_name="b",reason="of a new kind"} 1.0',
            'sluice_rejected_total{model_name="a",reason="queue_full"} 1.0'} <= set(lines)  # fmt: skip
    assert 'sluice_aborts_total{model_name="a",reason="of a new kind"} 1.0' not in lines


PROCESS = """
import sys
from frontend.workers.connection import ConnectionCounters
from frontend.observability.metrics import PrometheusMetrics
from frontend.request import Finish
from frontend.workers.status import ConnectionState, WorkerStatus
metrics = PrometheusMetrics()
metrics.models[""].first_tokens(0.01, 5)
metrics.models[""].finished(Finish.EOS, 1.0)
worker = WorkerStatus("w", ConnectionState.READY, "ready")
metrics.models[""].flush(ConnectionCounters(gaps=1), [worker])
sys.stdout.buffer.write(metrics.text())
"""


def test_any_process_answers_for_all_including_those_that_died(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    texts = [
        subprocess.run([sys.executable, "-c", PROCESS], env=environment, check=True, capture_output=True).stdout
        for _ in range(3)
    ]
    got = samples(texts[-1])
    assert got["sluice_generation_tokens_total"] == 15 and got["sluice_bus_gaps_total"] == 3
    assert got["sluice_time_to_first_token_seconds_count"] == 3 and got["sluice_request_success_total|eos"] == 3
    assert (got["sluice_workers"], got["sluice_workers_ready"]) == (1, 1)
