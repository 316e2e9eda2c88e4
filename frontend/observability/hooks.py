"""What is called with each request that has ended: access log, counts by key, traces. Their errors never reach it."""

import logging
import os
from collections.abc import Callable

from frontend.observability.access_log import LogEntry, RequestRecord, access_log, entry_of
from frontend.observability.metrics import PrometheusMetrics
from shared.config import ConfigError, FrontendConfig

log = logging.getLogger("sluice.frontend")

EndHook = Callable[[LogEntry, RequestRecord], None]


class EndHooks:
    """Called with every exchange that ends; `close` lets what is still on its way out."""

    def __init__(self) -> None:
        self._observers: list[EndHook] = []
        self._closes: list[Callable[[], None]] = []
        self._failed = False

    def add(self, observer: EndHook, close: Callable[[], None] = lambda: None) -> None:
        self._observers.append(observer)
        self._closes.append(close)

    def __call__(self, exchange: RequestRecord) -> None:
        try:
            entry = entry_of(exchange)
            for observer in self._observers:
                observer(entry, exchange)
        except Exception:
            if not self._failed:
                log.exception("request %s cannot be told of (further ones are not logged)", exchange.request_id)
            self._failed = True

    def close(self) -> None:
        for close in self._closes:
            close()


def observers(config: FrontendConfig, meters: PrometheusMetrics) -> EndHooks:
    """As the settings have it. Raises ConfigError when traces are asked for and cannot be sent."""
    found = EndHooks()
    found.add(lambda entry, exchange: meters.request_ended(entry.key, entry.prompt_tokens, entry.completion_tokens))
    if (access := access_log(config)) is not None:
        found.add(lambda entry, exchange: access(entry), access.close)
    if config.otlp_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        _add_traces(found, config.otlp_endpoint)
    return found


def _add_traces(found: EndHooks, endpoint: str) -> None:
    """What the flag asks for must be possible; what the environment asks for, everybody's, need not be."""
    try:
        from frontend.observability.tracing import Tracing  # which loads a lot

        traces = Tracing.over_http(endpoint)
    except ConfigError as error:
        if endpoint:
            raise
        log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but no traces are sent: %s", error)
    else:
        found.add(traces, traces.close)
