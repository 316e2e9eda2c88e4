"""The files for running Sluice in production name only existing metrics, flags, targets and files."""

import re
import shutil
import subprocess

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from frontend.observability.metrics import PrometheusMetrics
from frontend.workers.connection import ConnectionCounters
from frontend.workers.status import ConnectionState, WorkerStatus
from shared.messages import Status
from tests.deploy.monitoring.queries import MONITORING, queries, read, rules
from tests.fakes import READY_STATUS
from tests.patience import PATIENCE_S
from worker.engine.metrics import Metrics

NAME = re.compile(r"\bsluice_[a-z0-9_]+")
RECORDED = re.compile(r"\bsluice:[a-z0-9_]+:[a-z0-9_]+")


class Worker:
    def status(self) -> Status:
        return READY_STATUS


def families(text: bytes) -> set[str]:
    """Returns every metric name that a query may use, including counters that are still zero."""
    ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {family.name + end for family in text_string_to_metric_families(text.decode()) for end in ends[family.type]}


def exposed() -> dict[str, set[str]]:
    """Returns the metric names of each Prometheus job."""
    metrics = PrometheusMetrics()
    metrics.models[""].flush(ConnectionCounters(), [WorkerStatus("w", ConnectionState.READY, "ready", READY_STATUS)])
    return {
        "sluice-frontend": families(metrics.text()),
        "sluice-worker": families(generate_latest(Metrics().scrape_registry(Worker()))),
    }


def test_queries_name_metrics_that_their_job_exposes() -> None:
    there = exposed()
    selectors = [found for query in queries() for found in re.findall(r"(sluice_[a-z0-9_]+)(\{[^}]*\})?", query)]
    assert len(selectors) > 80
    for name, labels in selectors:
        job = re.search(r'job="([^"]*)"', labels)
        assert job, f"{name} does not say which job it means"
        assert name in there[job[1]], f"{job[1]} exposes no {name}"


def test_used_series_are_recorded() -> None:
    recorded = {rule["record"] for rule in rules("recording.yml")}
    used = {name for query in queries() for name in RECORDED.findall(query)}
    assert used and used <= recorded


def test_alerts_have_a_test_and_a_description() -> None:
    tests = {test["name"].partition(",")[0] for test in read("alerts_test.yml")["tests"]}
    for rule in rules("alerts.yml"):
        assert rule["alert"] in tests
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_alert_texts_name_existing_metrics() -> None:
    there = set().union(*exposed().values())
    for rule in rules("alerts.yml"):
        assert set(NAME.findall(" ".join(rule["annotations"].values()))) <= there


def test_prometheus_config_names_existing_files() -> None:
    config = read("prometheus.yml")
    named = [
        *config["rule_files"],
        *(f for job in config["scrape_configs"] for f in job["file_sd_configs"][0]["files"]),
    ]
    assert len(named) == 4 and all((MONITORING / name).is_file() for name in named)
    assert {job["job_name"] for job in config["scrape_configs"]} == set(exposed())


@pytest.mark.parametrize("what", [("config", "prometheus.yml"), ("rules", "recording.yml", "alerts.yml")])
def test_prometheus_accepts_its_files(what: tuple[str, ...]) -> None:
    """Runs only where Prometheus is installed. `python -m tests.ops` runs the unit tests of the alerts."""
    kind, *files = what
    if (promtool := shutil.which("promtool")) is not None:
        done = subprocess.run(
            [promtool, "check", kind, *files], cwd=MONITORING, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
    else:
        assert all(map(read, files))
