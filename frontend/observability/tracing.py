"""Exports each request as an OpenTelemetry span with its phases, by the conventions for generative AI.

Spans are made from the log entry when the request has ended, so that they cost nothing while it runs. A thread of the
SDK sends them in batches; while the collector is away, spans are lost, and nothing else happens.
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

import logging
import threading
import time
from typing import Self

from frontend.observability.access_log import LogEntry
from frontend.server.middleware import RequestRecord
from shared.config.declaration import ConfigError

MISSING_PACKAGES = "--otlp-endpoint needs `pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http`"

try:
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ConfigError(MISSING_PACKAGES) from error

OPERATIONS = {"chat": "chat", "messages": "chat", "completions": "text_completion", "events": "text_completion"}
PHASES = ("queue", "prefill", "decode")
CLOSE_S = 2.0


class Tracing:
    """An end hook that makes spans of generation requests."""

    def __init__(self, processor: "SpanProcessor") -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "sluice"}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("sluice")
        self._context = TraceContextTextMapPropagator()

    @classmethod
    def over_http(cls, endpoint: str) -> Self:
        """Creates a hook that exports to a collector at a base URL, such as http://localhost:4318. An empty `endpoint`
        means OTEL_EXPORTER_OTLP_ENDPOINT.

        Raises ConfigError when `endpoint` is no URL, or the exporter is not installed.
        """
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-endpoint must begin with http:// or https://, not {endpoint!r}")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise ConfigError(MISSING_PACKAGES) from error
        for name in ("opentelemetry.sdk", "opentelemetry.exporter"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # or the SDK would log a traceback for each lost batch
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces" if endpoint else None, timeout=5)
        return cls(BatchSpanProcessor(exporter))

    def __call__(self, entry: LogEntry, record: RequestRecord) -> None:
        if entry.dialect is None:
            return
        end = time.time_ns()
        start = end - _ns(entry.total_ms)
        operation = OPERATIONS.get(entry.dialect, entry.dialect)
        parent = self._context.extract({"traceparent": record.trace}) if record.trace else None
        span = self._tracer.start_span(
            f"{operation} {entry.model or ''}".strip(), parent, SpanKind.SERVER, _attributes(entry, operation),
            start_time=start,
        )  # fmt: skip
        if span.is_recording():
            if entry.outcome not in ("finished", "client_gone"):
                span.set_status(Status(StatusCode.ERROR, entry.error or entry.outcome))
            self._phases(entry, trace.set_span_in_context(span), end)
        span.end(end)

    def _phases(self, entry: LogEntry, within: object, end: int) -> None:
        """Adds the phases that the worker measured; the last phase ends with the request."""
        lengths = [_ns(getattr(entry, f"{phase}_ms") or 0.0) for phase in PHASES]
        at = end - sum(lengths)
        for phase, length in zip(PHASES, lengths, strict=True):
            if length:
                child = self._tracer.start_span(phase, within, start_time=at)  # type: ignore[arg-type]
                child.end(at + length)
            at += length

    def close(self) -> None:
        """Sends pending spans for up to CLOSE_S; the SDK itself would try for longer."""
        flush = threading.Thread(target=self._provider.force_flush, daemon=True)
        flush.start()
        flush.join(CLOSE_S)


def _attributes(entry: LogEntry, operation: str) -> dict[str, str | int | float | bool | tuple[str, ...]]:
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "sluice",
        "gen_ai.request.model": entry.model,
        "gen_ai.response.model": entry.model,
        "gen_ai.request.choice.count": entry.n if entry.n != 1 else None,
        "gen_ai.usage.input_tokens": entry.prompt_tokens,
        "gen_ai.usage.output_tokens": entry.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": entry.cached_tokens,
        "gen_ai.response.finish_reasons": tuple(reason or "error" for reason in entry.finish_reasons or ()) or None,
        "gen_ai.server.time_to_first_token": None if entry.ttft_ms is None else entry.ttft_ms / 1e3,
        "http.request.method": entry.method,
        "http.response.status_code": entry.status,
        "url.path": entry.path,
        "error.type": entry.error,
        "enduser.id": entry.key,
        "sluice.request_id": entry.request_id,
        "sluice.outcome": entry.outcome,
        "sluice.stream": entry.stream,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _ns(milliseconds: float) -> int:
    return int(milliseconds * 1e6)
