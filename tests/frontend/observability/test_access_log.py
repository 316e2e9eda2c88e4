"""One line for each request, however it ends, and a writer that never waits."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.errors import Overloaded
from frontend.observability import access_log
from frontend.observability.access_log import LogEntry, as_json, as_text, entry_of
from frontend.server.middleware import RequestRecord
from frontend.text.tokenizer import Tokenizer
from shared.log import NonBlockingWriter
from shared.messages import Outcome
from tests.fakes import MODEL, FakePool, sending
from tests.frontend.serving import Raw, app_over, serving, until
from tests.patience import PATIENCE_S

BODY = {"model": MODEL, "prompt": "secret words", "max_tokens": 8}


class Sink(list[dict[str, Any]]):
    """Replaces the access log's outlet, and keeps the lines that are written to it."""

    def put(self, data: bytes) -> None:
        assert data.count(b"\n") == 1 and data.endswith(b"\n") and len(data) < 4096
        self.append(json.loads(data))

    def close(self, timeout: float = 0.0) -> None: ...


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Sink:
    sink = Sink()
    monkeypatch.setattr(access_log.NonBlockingWriter, "to", lambda descriptor: sink)
    return sink


def client(pool: FakePool, tokenizer: Tokenizer, **config: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app_over(pool, tokenizer, access_log="json", **config))
    return httpx.AsyncClient(transport=transport, base_url="http://sluice")


async def test_finished_request_is_logged_once_with_all_fields(
    tokenizer: Tokenizer, told: Sink, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("sk-secret alice")
    (tmp_path / "keys").chmod(0o600)
    ids = tokenizer.encode_now(["hello"], False)[0]
    pool = FakePool(sending(ids, outcome=Outcome.LENGTH))
    headers = {"X-Api-Key": "sk-secret", "X-Request-Id": "mine-1"}
    async with client(pool, tokenizer, api_keys=str(tmp_path / "keys")) as http:
        for stream in (False, True):
            await http.post("/v1/completions?prompt=secret", json=BODY | {"stream": stream, "n": 2}, headers=headers)
    assert [entry["stream"] for entry in told] == [False, True]
    for entry in told:
        assert entry.keys() == set(LogEntry.__struct_fields__)
        assert (entry["request_id"], entry["method"], entry["path"]) == ("mine-1", "POST", "/v1/completions")
        assert (entry["status"], entry["outcome"], entry["error"]) == (200, "finished", None)
        assert (entry["key"], entry["dialect"], entry["model"], entry["n"]) == ("alice", "completions", MODEL, 2)
        assert (entry["prompt_tokens"], entry["completion_tokens"]) == (len(pool.submitted[0].prompt), 2 * len(ids))
        assert (entry["queue_ms"], entry["prefill_ms"], entry["decode_ms"]) == (1.0, 2.0, 3.0)
        assert 0 < entry["ttft_ms"] <= entry["total_ms"] and entry["finish_reasons"] == ["length"] * 2
        assert "secret" not in json.dumps(entry) and "hello" not in json.dumps(entry)


async def test_refused_and_failed_requests_are_logged(tokenizer: Tokenizer, told: Sink) -> None:
    full = FakePool(refusals={0: Overloaded("full", code="queue_full")})
    broken = FakePool(sending([65], outcome=Outcome.ERROR))
    hanging = FakePool(lambda pool, stream: pool.send_tokens(stream, [65]))
    async with client(full, tokenizer) as http:
        await http.post("/v1/completions", json=BODY)
        await http.post("/v1/completions", json=BODY | {"top_p": 9})
        await http.post("/v1/completions", content=b"{")
        await http.get("/nowhere%0D%0Aat%20all")
        await http.get("/health")
    async with client(broken, tokenizer) as http:
        await http.post("/v1/completions", json=BODY)
        await http.post("/v1/completions", json=BODY | {"stream": True})
    async with client(hanging, tokenizer) as http:
        await http.post("/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "x"}],
                                                      "deadline_ms": 30})  # fmt: skip
    assert [(entry["status"], entry["outcome"], entry["error"]) for entry in told] == [
        (503, "refused", "queue_full"),
        (422, "refused", "out_of_range"),
        (400, "refused", "invalid_request_error"),
        (404, "refused", "not_found_error"),
        (500, "error", "worker_error"),
        (200, "error", "worker_error"),
        (504, "deadline", "deadline_exceeded"),
    ]
    assert told[5]["completion_tokens"] == 1 and told[5]["finish_reasons"] == [None]


async def test_outcome_tells_a_client_that_left_from_a_shutdown(tokenizer: Tokenizer, told: Sink) -> None:
    pool = FakePool(lambda pool, stream: pool.send_tokens(stream, [65]))
    app = app_over(pool, tokenizer, access_log="json")
    async with serving(app) as url:
        for stream in (True, False):
            raw = await Raw.post(url, "/v1/completions", BODY | {"stream": stream})
            await until(lambda n=1 + (not stream): len(pool.submitted) == n)
            if stream:
                await raw.reader.readuntil(b"data: ")
            await raw.leave()
            await until(lambda n=1 + (not stream): len(told) == n)
        raw = await Raw.post(url, "/v1/completions", BODY | {"stream": True})
        await until(lambda: len(pool.submitted) == 3)
        await app.state.models.drain(0.0)
        await until(lambda: len(told) == 3)
        await raw.leave()
    assert [entry["outcome"] for entry in told] == ["client_gone", "client_gone", "shutdown"]
    assert [entry["status"] for entry in told] == [200, None, 200]


@pytest.mark.parametrize("render", [as_json, as_text])
def test_log_has_no_line_for_successful_probes_and_scrapes(render: Callable[[LogEntry], bytes]) -> None:
    lines: list[bytes] = []
    sink = Sink()
    sink.put = lines.append  # type: ignore[method-assign]
    log = access_log.AccessLog(render, sink)  # type: ignore[arg-type]
    for path in ("/health", "/ready", "/metrics", "/ping", "/", "/web/main.js"):
        one = RequestRecord("req_1", "GET", path, "")
        one.status = 200
        log(entry_of(one))
        assert lines == []
        one.status, one.outcome = 503, "refused"
        log(entry_of(one))
        assert len(lines) == 1, "a probe that is refused has a line"
        lines.clear()


def test_text_log_has_one_line() -> None:
    def exchange(method: str, path: str, status: int, outcome: str = "") -> LogEntry:
        one = RequestRecord("req_1", method, path, "")
        one.status, one.outcome, one.tenant = status, outcome, "alice"
        return entry_of(one)

    said = as_text(exchange("POST", "/x\n\x1b[2J", 404, "refused")).decode()
    assert said.count("\n") == 1 and "\x1b" not in said and "POST" in said and "404 refused" in said
    assert said.endswith("alice, req_1\n")


def test_line_costs_few_microseconds() -> None:
    """A line typically takes 5 µs. It may take 20 µs together with the request's other bookkeeping."""
    one = RequestRecord("req_" + "0" * 24, "POST", "/v1/chat/completions", "")
    best = min(_seconds(lambda: as_json(entry_of(one)), 500) for _ in range(5))
    assert best < 200e-6


def _seconds(work: Any, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times


# The outlet, through which lines are written


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)


async def test_full_pipe_delays_no_request(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pipe() as (reading, writing):
        outlet = NonBlockingWriter.to(writing, limit=100_000)
        monkeypatch.setattr(access_log.NonBlockingWriter, "to", lambda descriptor: outlet)
        filler = b"x" * 999 + b"\n"
        for _ in range(1000):
            outlet.put(filler)
        assert outlet.dropped >= 1000 - 100 - 65, "what the pipe and the limit do not hold"
        await asyncio.sleep(0.1)  # now the thread waits for a full pipe
        async with asyncio.timeout(PATIENCE_S):
            async with client(FakePool(sending([65])), tokenizer) as http:
                assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        got = bytearray()
        before = threading.active_count()
        closing = threading.Thread(target=outlet.close, args=(10.0,))
        closing.start()
        while len(got) < 1000 * (1000 - outlet.dropped):
            got += os.read(reading, 1 << 16)
        closing.join()
        assert got.startswith(filler) and threading.active_count() < before + 1
        os.close(writing)
