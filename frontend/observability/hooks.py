"""Hooks called for each request that has ended: access log, record, counts by API key, traces.

An error in a hook never reaches the request.
"""

import logging
import os
from collections.abc import Callable

from frontend.observability.access_log import LogEntry, access_log, entry_of
from frontend.observability.metrics import PrometheusMetrics
from frontend.observability.recording import Recorder
from frontend.server.middleware import RequestRecord
from shared.config.declaration import ConfigError
from shared.config.frontend import FrontendConfig

log = logging.getLogger("sluice.frontend")

EndHook = Callable[[LogEntry, RequestRecord], None]


class EndHooks:
    """Called with the record of every request that ends. `close` waits for pending output."""

    def __init__(self) -> None:
        self._hooks: list[EndHook] = []
        self._closes: list[Callable[[], None]] = []
        self._failed = False

    def add(self, hook: EndHook, close: Callable[[], None] = lambda: None) -> None:
        self._hooks.append(hook)
        self._closes.append(close)

    def __call__(self, record: RequestRecord) -> None:
        try:
            entry = entry_of(record)
            for hook in self._hooks:
                hook(entry, record)
        except Exception:
            if not self._failed:
                log.exception("a hook failed for request %s (more failures are not logged)", record.request_id)
            self._failed = True

    def close(self) -> None:
        for close in self._closes:
            close()


def end_hooks(config: FrontendConfig, metrics: PrometheusMetrics) -> EndHooks:
    """Creates the hooks that the settings ask for. Raises ConfigError if the record cannot be written, or if traces are
    requested but cannot be sent."""
    hooks = EndHooks()
    hooks.add(lambda entry, record: metrics.request_ended(entry.key, entry.prompt_tokens, entry.completion_tokens))
    if (access := access_log(config)) is not None:
        hooks.add(lambda entry, record: access(entry), access.close)
    if config.record:
        recorder = Recorder.to(config.record, config.record_max_bytes, config.record_files)
        hooks.add(recorder, recorder.close)
    if config.otlp_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        _add_tracing(hooks, config.otlp_endpoint)
    return hooks


def _add_tracing(hooks: EndHooks, endpoint: str) -> None:
    """Adds the tracing hook. A failure raises ConfigError if a flag asked for tracing. It only logs a warning if the
    environment variable did, because that may be meant for other programs."""
    try:
        from frontend.observability.tracing import Tracing  # loaded on demand, because it imports a lot

        tracing = Tracing.over_http(endpoint)
    except ConfigError as error:
        if endpoint:
            raise
        log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but no traces are sent: %s", error)
    else:
        hooks.add(tracing, tracing.close)
