"""Tests of frontend/observability/hooks.py."""

import sys

import pytest

from frontend.observability.access_log import LogEntry
from frontend.observability.hooks import EndHooks, end_hooks
from frontend.observability.metrics import PrometheusMetrics
from frontend.server.middleware import RequestRecord
from shared.config.declaration import ConfigError
from shared.config.frontend import FrontendConfig


def test_hooks_get_the_entry_and_the_record_of_a_request() -> None:
    calls: list[tuple[LogEntry, RequestRecord]] = []
    hooks, record = EndHooks(), RequestRecord("req_1", "GET", "/stats", "")
    hooks.add(lambda entry, record: calls.append((entry, record)))
    hooks(record)
    [(entry, seen)] = calls
    assert (entry.request_id, entry.path, seen) == ("req_1", "/stats", record)


def test_failing_hook_is_logged_once_and_harms_no_request(caplog: pytest.LogCaptureFixture) -> None:
    def fail(entry: LogEntry, record: RequestRecord) -> None:
        raise RuntimeError("broken")

    hooks = EndHooks()
    hooks.add(fail)
    for number in range(3):
        hooks(RequestRecord(f"req_{number}", "GET", "/", ""))
    assert [entry.getMessage() for entry in caplog.records if "req_" in entry.getMessage()] == [
        "a hook failed for request req_0 (more failures are not logged)"
    ]


def test_close_closes_every_hook() -> None:
    closed: list[int] = []
    hooks = EndHooks()
    for number in range(2):
        hooks.add(lambda entry, record: None, lambda number=number: closed.append(number))  # type: ignore[misc]
    hooks.close()
    assert closed == [0, 1]


def test_hooks_of_the_settings_count_by_api_key() -> None:
    metrics = PrometheusMetrics()
    record = RequestRecord("req_1", "POST", "/v1/completions", "")
    record.tenant = "alice"
    end_hooks(FrontendConfig(access_log="off"), metrics)(record)
    assert b'sluice_key_requests_total{key="alice"} 1.0' in metrics.text()


def test_missing_tracing_packages_are_an_error_for_the_flag_and_a_warning_for_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "frontend.observability.tracing", raising=False)
    with monkeypatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
        end_hooks(FrontendConfig(access_log="off"), PrometheusMetrics())
    assert "no traces are sent" in caplog.text
    with pytest.raises(ConfigError, match="opentelemetry-sdk"):
        end_hooks(FrontendConfig(access_log="off", otlp_endpoint="http://localhost:4318"), PrometheusMetrics())
