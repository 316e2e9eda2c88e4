"""Requests as OpenTelemetry spans: attributes, parents, and that no request waits for a collector."""

import gzip
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from frontend.errors import Overloaded
from frontend.observability.tracing import Tracing
from frontend.text.tokenizer import Tokenizer
from shared.config.declaration import ConfigError
from tests.fakes import MODEL, FakePool, sending
from tests.frontend.serving import app_over

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "secret"}], "max_tokens": 8}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def ask(pool: FakePool, tokenizer: Tokenizer, *requests: dict[str, str], **config: str) -> None:
    transport = httpx.ASGITransport(app_over(pool, tokenizer, **config))
    async with httpx.AsyncClient(transport=transport, base_url="http://sluice") as http:
        for headers in requests:
            await http.post("/v1/chat/completions", json=BODY, headers=headers)


async def test_request_becomes_a_span_with_its_phases_in_the_clients_trace(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = InMemorySpanExporter()
    monkeypatch.setattr(Tracing, "over_http", lambda endpoint: Tracing(SimpleSpanProcessor(memory)))
    pool = FakePool(sending([65]), refusals={1: Overloaded("full", code="queue_full")})
    parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    await ask(pool, tokenizer, parent, {"traceparent": "00-nonsense"}, otlp_endpoint="http://x")
    *phases, span, refused = memory.get_finished_spans()
    assert (span.name, f"{span.context.trace_id:x}", f"{span.parent.span_id:x}") == (
        f"chat {MODEL}", TRACE.lstrip("0"), PARENT,
    )  # fmt: skip
    said = dict(span.attributes or {})
    assert said["gen_ai.request.model"] == MODEL and said["gen_ai.usage.output_tokens"] == 1
    assert said["gen_ai.response.finish_reasons"] == ("eos",) and "secret" not in str(said)
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    assert all(phase.parent == span.context for phase in phases)
    lengths = [round((phase.end_time - phase.start_time) / 1e6) for phase in phases]
    assert lengths == [1, 2, 3] and phases[-1].end_time == span.end_time
    assert refused.parent is None and refused.status.status_code is StatusCode.ERROR
    assert dict(refused.attributes or {})["error.type"] == "queue_full"


async def test_spans_reach_a_collector_by_http(tokenizer: Tokenizer) -> None:
    got: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            assert self.path == "/v1/traces"
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        app = app_over(FakePool(sending([65])), tokenizer, otlp_endpoint=f"http://127.0.0.1:{collector.server_port}/")
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://s") as http,
        ):
            assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200
        collector.shutdown()
    spans = [
        span
        for request in map(ExportTraceServiceRequest.FromString, got)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert sorted(span.name for span in spans) == sorted([f"chat {MODEL}", "queue", "prefill", "decode"])


async def test_missing_collector_fails_no_request_and_delays_no_exit(tokenizer: Tokenizer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # accepts connections and never answers
        app = app_over(FakePool(sending([65])), tokenizer, otlp_endpoint=f"http://127.0.0.1:{deaf.getsockname()[1]}")
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://s") as http,
        ):
            for _ in range(20):
                assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200
            leaving = time.monotonic()
        assert time.monotonic() - leaving < 20.0


def test_opentelemetry_is_imported_only_on_demand_and_the_flag_must_be_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, frontend.__main__; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.strip() == "[]"
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        Tracing.over_http("localhost:4318")
