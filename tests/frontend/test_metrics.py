"""What /metrics says, alone and for several processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from deploy.reference import tables
from frontend.observability.metrics import PrometheusMetrics
from frontend.request import Finish
from frontend.workers.connection import WireCounters
from frontend.workers.status import ConnectionState, WorkerStatus
from shared.messages import Status, Timings, WorkerState
from tests.fakes import READY_STATUS


def samples(text: bytes) -> dict[str, float]:
    return {
        sample.name + "".join(f"|{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def status(epoch: int, queries: int, hits: int) -> Status:
    return Status(epoch, 1, "m", "cpu", "float32", WorkerState.READY, prefix_queries=queries, prefix_hits=hits)


def workers(*statuses: Status) -> list[WorkerStatus]:
    return [WorkerStatus(f"w{i}", ConnectionState.READY, "ready", one) for i, one in enumerate(statuses)]


def test_observations_arrive_under_the_names_dashboards_know() -> None:
    meters = PrometheusMetrics("x_")
    meters.admitted(10)
    meters.first(0.004, 1)
    meters.gap(0.03, 3)
    meters.finished(Finish.EOS, 2.0, Timings(100.0, 200.0, 300.0))
    meters.aborted("client")
    meters.rejected("queue_full")
    meters.lag(0.0)
    got = samples(meters.text(WireCounters(gaps=2, resyncs=3, resumed=4, lost=5), workers(READY_STATUS)))
    assert got["x_prompt_tokens_total"] == 10 and got["x_generation_tokens_total"] == 4
    ttft, itl = "x_time_to_first_token_seconds", "x_inter_token_latency_seconds"
    assert (got[f"{ttft}_bucket|0.005"], got[f"{ttft}_bucket|0.0025"]) == (1, 0)
    assert (got[f"{itl}_count"], got[f"{itl}_bucket|0.01"], got[f"{itl}_bucket|0.005"]) == (3, 3, 0)
    assert abs(got[f"{itl}_sum"] - 0.03) < 1e-9
    assert got["x_e2e_request_latency_seconds_sum"] == 2.0
    assert got["x_request_queue_time_seconds_sum"] == 0.1
    assert got["x_request_prefill_time_seconds_sum"] == 0.2
    assert got["x_request_decode_time_seconds_sum"] == 0.3
    assert got["x_request_success_total|eos"] == got["x_aborts_total|client"] == 1
    assert got["x_rejected_total|queue_full"] == 1
    assert got["x_frontend_loop_lag_seconds_count"] == 1
    wire = ("bus_gaps", "resyncs", "streams_resumed", "streams_lost")
    assert [got[f"x_{name}_total"] for name in wire] == [2, 3, 4, 5]
    assert (got["x_num_requests_running"], got["x_num_requests_waiting"], got["x_kv_cache_usage_perc"]) == (2, 1, 0.1)
    assert (got["x_worker_epoch"], got["x_worker_last_step_age_seconds"]) == (1, 0)
    assert (got["x_prefix_cache_queries_total"], got["x_prefix_cache_hits_total"]) == (100, 40)


def test_what_may_happen_is_counted_from_zero() -> None:
    """A series that appears as 1 has no rate: its first event would be seen by no alert."""
    [codes] = re.findall(r"^\| 503 \| (.*) \|$", tables.codes(), re.MULTILINE)
    refused = {one.code for one in tables.early()} | {"write_timeout"}
    rejected = set(re.findall(r"`(\w+)`", codes)) - refused
    expected = {f"sluice_rejected_total|{code}" for code in rejected}
    expected |= {f"sluice_http_refused_total|{code}" for code in refused}
    expected |= {f"sluice_aborts_total|{why}" for why in ("client", "stop", "deadline_exceeded", "write_timeout")}
    expected |= {f"sluice_request_success_total|{finish}" for finish in ("eos", "stop", "length")}
    got = samples(PrometheusMetrics().text(WireCounters(), []))
    assert {name: got.get(name) for name in expected} == dict.fromkeys(expected, 0)


def test_a_bucket_holds_what_equals_its_bound_as_prometheus_has_it() -> None:
    meters = PrometheusMetrics()
    meters.first(0.005, 1)
    assert samples(meters.text(WireCounters(), []))["sluice_time_to_first_token_seconds_bucket|0.005"] == 1


def test_scraping_twice_counts_once() -> None:
    meters = PrometheusMetrics()
    meters.first(0.01, 1)
    wire = WireCounters(gaps=1)
    assert samples(meters.text(wire, workers(READY_STATUS))) == samples(meters.text(wire, workers(READY_STATUS)))


def test_without_a_worker_its_gauges_are_absent() -> None:
    got = samples(PrometheusMetrics().text(WireCounters(), []))
    assert "sluice_num_requests_running" not in got and got["sluice_bus_gaps_total"] == 0
    assert (got["sluice_workers"], got["sluice_workers_ready"]) == (0, 0)


def test_a_worker_that_is_known_but_cannot_serve_is_not_counted_as_ready() -> None:
    members = [
        *workers(READY_STATUS, READY_STATUS),
        WorkerStatus("w2", ConnectionState.LOADING, "loading 15%", READY_STATUS),
    ]
    got = samples(PrometheusMetrics().text(WireCounters(), members))
    assert (got["sluice_workers"], got["sluice_workers_ready"]) == (3, 2)


def test_a_worker_that_comes_back_never_makes_a_counter_fall() -> None:
    meters = PrometheusMetrics()
    seen = [
        samples(meters.text(WireCounters(), workers(one)))["sluice_prefix_cache_hits_total"]
        for one in (status(1, 10, 5), status(1, 20, 9), status(2, 0, 0), status(2, 4, 2), status(3, 1, 1))
    ]
    assert seen == [5, 9, 9, 11, 12]


def test_several_workers_are_added_up_and_one_that_leaves_never_makes_a_counter_fall() -> None:
    meters = PrometheusMetrics()
    both = samples(meters.text(WireCounters(), workers(status(1, 10, 5), status(4, 20, 9))))
    assert both["sluice_prefix_cache_hits_total"] == 14
    assert (both["sluice_worker_epoch|w0"], both["sluice_worker_epoch|w1"]) == (1, 4)
    one = samples(meters.text(WireCounters(), workers(status(2, 4, 2))))
    assert (one["sluice_prefix_cache_hits_total"], one["sluice_worker_epoch"]) == (16, 2)


PROCESS = """
import sys
from frontend.workers.connection import WireCounters
from frontend.observability.metrics import PrometheusMetrics
from frontend.request import Finish
from frontend.workers.status import ConnectionState, WorkerStatus
from shared.messages import Status, Timings, WorkerState
meters = PrometheusMetrics()
meters.first(0.01, 5)
meters.finished(Finish.EOS, 1.0, Timings())
status = Status(1, 1, "m", "cpu", "float32", WorkerState.READY, running=7, prefix_queries=30, prefix_hits=20)
sys.stdout.buffer.write(meters.text(WireCounters(gaps=1), [WorkerStatus("w", ConnectionState.READY, "ready", status)]))
"""


def test_any_process_answers_for_all_even_for_those_that_died(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    texts = [
        subprocess.run([sys.executable, "-c", PROCESS], env=environment, check=True, capture_output=True).stdout
        for _ in range(3)
    ]
    got = samples(texts[-1])
    assert got["sluice_generation_tokens_total"] == 15 and got["sluice_bus_gaps_total"] == 3
    assert got["sluice_time_to_first_token_seconds_count"] == 3 and got["sluice_request_success_total|eos"] == 3
    assert got["sluice_num_requests_running"] == 7 and got["sluice_prefix_cache_hits_total"] == 20
    assert b"# TYPE sluice_prefix_cache_hits_total counter" in texts[-1]
