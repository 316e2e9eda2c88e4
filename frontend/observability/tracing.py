"""Each request as an OpenTelemetry span by the conventions for generative AI, with its phases below it.

Spans are made when the request has ended, from the times in its entry, so that nothing is done while it runs. They
leave in batches from a thread of the SDK's; a collector that is away costs spans and nothing else.
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

import logging
import threading
import time
from typing import Self

from frontend.observability.access_log import LogEntry, RequestRecord
from shared.config import ConfigError

NEEDED = "--otlp-endpoint needs `pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http`"

try:
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ConfigError(NEEDED) from error

OPERATIONS = {"chat": "chat", "messages": "chat", "completions": "text_completion", "events": "text_completion"}
PHASES = ("queue", "prefill", "decode")
CLOSE_S = 2.0


class Tracing:
    """Makes spans of the requests that ask a model for something."""

    def __init__(self, processor: "SpanProcessor") -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "sluice"}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("sluice")
        self._context = TraceContextTextMapPropagator()

    @classmethod
    def over_http(cls, endpoint: str) -> Self:
        """To a collector's base address, as http://localhost:4318; empty: OTEL_EXPORTER_OTLP_ENDPOINT's.

        Raises ConfigError when it is none, or the exporter is not installed.
        """
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-endpoint begins with http:// or https://, unlike {endpoint!r}")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise ConfigError(NEEDED) from error
        for name in ("opentelemetry.sdk", "opentelemetry.exporter"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # a trace for every batch that nobody takes
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces" if endpoint else None, timeout=5)
        return cls(BatchSpanProcessor(exporter))

    def __call__(self, entry: LogEntry, exchange: RequestRecord) -> None:
        if entry.dialect is None:
            return
        end = time.time_ns()
        start = end - _ns(entry.total_ms)
        operation = OPERATIONS.get(entry.dialect, entry.dialect)
        parent = self._context.extract({"traceparent": exchange.trace}) if exchange.trace else None
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
        """The worker's account of a request; its end is taken for the last phase's."""
        lengths = [_ns(getattr(entry, f"{phase}_ms") or 0.0) for phase in PHASES]
        at = end - sum(lengths)
        for phase, length in zip(PHASES, lengths, strict=True):
            if length:
                child = self._tracer.start_span(phase, within, start_time=at)  # type: ignore[arg-type]
                child.end(at + length)
            at += length

    def close(self) -> None:
        """What waits goes out, for as long as CLOSE_S; the SDK itself would try for longer."""
        last = threading.Thread(target=self._provider.force_flush, daemon=True)
        last.start()
        last.join(CLOSE_S)


def _attributes(entry: LogEntry, operation: str) -> dict[str, str | int | float | bool | tuple[str, ...]]:
    found = {
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
    return {name: value for name, value in found.items() if value is not None}


def _ns(milliseconds: float) -> int:
    return int(milliseconds * 1e6)
