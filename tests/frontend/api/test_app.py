"""The routes over HTTP: responses, errors, API keys, limits. Streams over real sockets: test_app_streams."""

import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from frontend.errors import Overloaded, Unprocessable
from frontend.text.tokenizer import Tokenizer
from frontend.workers.status import DRAINING, READY, not_ready
from shared.config.declaration import ConfigError
from shared.messages import Outcome, WorkerState
from tests.fakes import MODEL, READY_STATUS, FakePool
from tests.frontend.serving import app_over, completing, http_client

BODY = {"model": MODEL, "prompt": "abc", "max_tokens": 8}


async def test_completion_without_stream_is_one_json_object(tokenizer: Tokenizer) -> None:
    async with http_client(completing(tokenizer), tokenizer) as http:
        answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion" and body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "text": "hello",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "matched_stop": None,
            "seed": 77,
        }
    ]
    assert body["usage"]["completion_tokens"] == len(tokenizer.encode_now(["hello"], False)[0])


async def test_stream_format_of_the_body_overrides_the_servers(tokenizer: Tokenizer) -> None:
    async with http_client(completing(tokenizer), tokenizer) as http:
        asked = await http.post("/v1/completions", json=BODY | {"stream_format": "events"})
    async with http_client(completing(tokenizer), tokenizer, completions_stream_format="events") as http:
        default = await http.post("/v1/completions", json=BODY)
        other = await http.post("/v1/completions", json=BODY | {"stream_format": "openai"})
    assert asked.text == default.text and asked.text.count("event: done\n") == 1
    assert asked.headers["content-type"].startswith("text/event-stream")
    assert other.json()["choices"][0]["text"] == "hello"


async def test_stream_has_event_stream_headers(tokenizer: Tokenizer) -> None:
    async with http_client(completing(tokenizer), tokenizer) as http:
        answer = await http.post("/v1/completions", json=BODY | {"stream": True})
    assert answer.headers["cache-control"] == "no-store" and answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"] and answer.text.endswith("data: [DONE]\n\n")


async def test_response_has_a_request_id_and_keeps_a_valid_one(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        ids = [(await http.get(path)).headers["x-request-id"] for path in ("/health", "/nowhere", "/stats")]
        own = await http.get("/health", headers={"X-Request-Id": "abc-1"})
        odd = await http.get("/health", headers={"X-Request-Id": "a b"})
    assert len(set(ids)) == 3
    assert own.headers["x-request-id"] == "abc-1" and odd.headers["x-request-id"] != "a b"


@pytest.mark.parametrize(
    ("content", "status", "kind", "param"),
    [
        (b"{", 400, "invalid_request_error", None),
        (json.dumps(BODY | {"prompt": 5}).encode(), 400, "invalid_request_error", "prompt"),
        (json.dumps(BODY | {"prompt": ""}).encode(), 400, "invalid_request_error", "prompt"),
        (json.dumps(BODY | {"temperature": -1}).encode(), 422, "invalid_request_error", "temperature"),
        (json.dumps(BODY | {"foo": 1}).encode(), 422, "invalid_request_error", "foo"),
        (json.dumps(BODY | {"model": "x"}).encode(), 422, "invalid_request_error", "model"),
        (json.dumps(BODY | {"max_tokens": 600}).encode(), 422, "invalid_request_error", "prompt"),
    ],
)
async def test_invalid_request_is_refused_before_the_stream(
    tokenizer: Tokenizer, content: bytes, status: int, kind: str, param: str | None
) -> None:
    pool = FakePool()
    async with http_client(pool, tokenizer) as http:
        answer = await http.post("/v1/completions", content=content)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (status, kind, param)
    assert set(error) == {"message", "type", "param", "code"} and pool.calls == 0


async def test_error_of_typed_events_has_their_envelope(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        answer = await http.post("/v1/completions", json=BODY | {"stream_format": "events", "temperature": -1})
    assert answer.status_code == 422 and list(answer.json()) == ["error"] and "temperature" in answer.json()["error"]


async def test_unknown_route_is_404_and_wrong_method_405(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        missing, wrong = await http.post("/v1/nowhere"), await http.get("/v1/completions")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "not_found_error")
    assert (wrong.headers["allow"], "allow" in missing.headers) == ("POST", False)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/v1/batches", "GET, HEAD, POST"),
        ("PATCH", "/v1/conversations/x", "DELETE, GET, HEAD, POST"),
        ("PUT", "/v1/responses/compact", "DELETE, GET, HEAD, POST"),
        ("GET", "/v1/completions", "POST"),
    ],
)
async def test_wrong_method_is_told_all_methods_of_the_path(
    tokenizer: Tokenizer, method: str, path: str, allow: str
) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        wrong = await http.request(method, path)
    assert wrong.status_code == 405 and wrong.headers["allow"] == allow
    assert wrong.json()["error"]["message"] == f"{path!r} takes {allow}, not {method}"


@pytest.mark.parametrize(
    "path", ["/v1/images/generations", "/v1/messages/nothing", "/api/push", "/v1/chat/completions/"]
)
async def test_unknown_route_is_named(tokenizer: Tokenizer, path: str) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        missing = await http.post(path, json={})
    assert missing.status_code == 404 and f"there is no route POST '{path}'" in missing.text


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_over_the_limit_is_413(tokenizer: Tokenizer, chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 100

    async with http_client(FakePool(), tokenizer, max_body_bytes=999) as http:
        answer = await http.post("/v1/completions", content=pieces() if chunked else b" " * 1000)
        fits = await http.post("/v1/completions", content=b" " * 999)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    assert fits.status_code == 400


@pytest.mark.parametrize(("after", "header"), [(0.0, "1"), (2.1, "3")])
async def test_full_queue_is_503_with_retry_after(tokenizer: Tokenizer, after: float, header: str) -> None:
    pool = FakePool(refusals={0: Overloaded("the queue is full", code="queue_full", retry_after=after)})
    async with http_client(pool, tokenizer) as http:
        answer = await http.post("/v1/completions", json=BODY | {"stream": True})
        metrics = (await http.get("/metrics")).text
    assert (answer.status_code, answer.headers["retry-after"]) == (503, header)
    assert answer.json()["error"]["type"] == "overloaded_error"
    assert 'sluice_rejected_total{reason="queue_full"} 1.0' in metrics


async def test_missing_worker_or_tokenizer_is_503(tokenizer: Tokenizer) -> None:
    for pool, loaded in ((FakePool(readiness=not_ready("worker lost")), tokenizer), (FakePool(), None)):
        async with http_client(pool, loaded) as http:
            answer = await http.post("/v1/completions", json=BODY)
            health = await http.get("/health")
            ready = await http.get("/ready")
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert health.status_code == 200 and health.json()["status"] == "ok"
        assert ready.status_code == 503 and ready.json()["status"] == "not_ready"


async def test_unprocessable_refusal_of_the_worker_is_422(tokenizer: Tokenizer) -> None:
    pool = FakePool(refusals={0: Unprocessable("too long", code="context_length_exceeded")})
    async with http_client(pool, tokenizer) as http:
        answer = await http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "context_length_exceeded")


async def test_failed_step_without_stream_is_500(tokenizer: Tokenizer) -> None:
    async with http_client(completing(tokenizer, outcome=Outcome.ERROR), tokenizer) as http:
        answer = await http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "internal_error")


async def test_internal_error_is_500_with_an_id_and_a_logged_trace(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(pool: FakePool, stream: object) -> None:
        raise ZeroDivisionError("secret")

    async with http_client(FakePool(broken), tokenizer) as http:
        answer = await http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "find-me"})
    assert answer.status_code == 500 and "secret" not in answer.text
    assert "find-me" in answer.json()["error"]["message"]
    record = next(record for record in caplog.records if "find-me" in record.getMessage())
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize("path", ["completions", "chat/completions", "messages", "responses"])
async def test_priority_deadline_and_cache_salt_reach_the_worker_in_all_formats(
    tokenizer: Tokenizer, path: str
) -> None:
    pool = completing(tokenizer)
    turn = {"messages": [{"role": "user", "content": "hi"}], "model": MODEL, "max_tokens": 8}
    asked = {"completions": BODY, "responses": {"model": MODEL, "input": "hi", "max_output_tokens": 8}}
    body = asked.get(path, turn) | {"priority": -3, "deadline_ms": 60_000, "cache_salt": "s"}
    async with http_client(pool, tokenizer) as http:
        answers = [
            await http.post(f"/v1/{path}", json=body | odd)
            for odd in ({}, {"deadline_ms": 0}, {"priority": 1.5}, {"cache_salt": ""})
        ]
    refused = 422 if path == "completions" else 400
    assert [answer.status_code for answer in answers] == [200, refused, 400, refused]
    assert "deadline_ms" in answers[1].text and "priority" in answers[2].text
    (one,) = pool.submitted
    submit = one.stream.submit
    assert (submit.priority, submit.cache_salt) == (-3, "s") and 59_000 < submit.deadline_ms <= 60_000


@pytest.mark.parametrize(("path", "kind"), [("completions", "timeout_error"), ("messages", "timeout_error")])
async def test_deadline_is_504_before_the_headers_and_an_error_event_after(
    tokenizer: Tokenizer, path: str, kind: str
) -> None:
    # one token, after which the worker hangs or is lost
    pool = FakePool(lambda pool, stream: pool.send_tokens(stream, [65]))
    body = {"model": MODEL, "max_tokens": 8, "deadline_ms": 1000}
    body |= {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    async with http_client(pool, tokenizer) as http:
        whole = await http.post(f"/v1/{path}", json=body)
        streamed = await http.post(f"/v1/{path}", json=body | {"stream": True})
        metrics = (await http.get("/metrics")).text
    assert (whole.status_code, whole.json()["error"]["type"]) == (504, kind)
    assert whole.headers["x-should-retry"] == "false", "the SDKs' word for: do not try again by yourself"
    assert streamed.status_code == 200 and kind in streamed.text
    assert "[DONE]" not in streamed.text and "message_stop" not in streamed.text
    assert len(pool.aborted) == 2
    assert 'sluice_aborts_total{reason="deadline_exceeded"} 2.0' in metrics


async def test_deadline_passes_while_the_worker_has_not_admitted_the_request(tokenizer: Tokenizer) -> None:
    pool = FakePool(delays={0: 60.0, 1: 60.0})
    async with http_client(pool, tokenizer) as http:
        began = time.perf_counter()
        answer = await http.post("/v1/completions", json=BODY | {"deadline_ms": 50, "n": 2})
        metrics = (await http.get("/metrics")).text
    assert answer.status_code == 504 and time.perf_counter() - began < 10.0
    assert 'sluice_aborts_total{reason="deadline_exceeded"} 2.0' in metrics


async def test_page_of_metrics_tells_the_start_of_the_process_as_llama_cpp_does(tokenizer: Tokenizer) -> None:
    before = int(time.time())
    async with http_client(FakePool(), tokenizer) as http:
        told = (await http.get("/metrics")).headers["Process-Start-Time-Unix"]
    assert before <= int(told) <= time.time()


async def test_api_keys_guard_every_route_with_data(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsk-one\n\nsk-two\n")
    keys.chmod(0o600)
    async with http_client(completing(tokenizer), tokenizer, api_keys=str(keys)) as http:
        for path in ("/stats", "/metrics", "/v1/models", "/nowhere"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert (await http.post("/v1/completions", json=BODY)).status_code == 401
        assert (await http.get("/health")).status_code == (await http.get("/ready")).status_code == 200
        page = [(await http.get(path)).status_code for path in ("/", "/web/main.js", "/web/..%2fstats", "/web/x.js")]
        # the page needs no key, because a browser cannot send a key when it opens a page
        assert page == [200, 200, 404, 404]
        good = {"Authorization": "Bearer sk-one"}, {"authorization": "bearer sk-two"}, {"X-Api-Key": "sk-one"}
        bad = {"Authorization": "Bearer # ours"}, {"Authorization": "sk-one"}, {"X-Api-Key": ""}
        assert [(await http.get("/stats", headers=headers)).status_code for headers in good] == [200] * 3
        assert [(await http.get("/stats", headers=headers)).status_code for headers in bad] == [401] * 3


async def test_changed_key_file_takes_effect_at_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-old\n")
    keys.chmod(0o600)
    async with http_client(FakePool(), tokenizer, api_keys=str(keys)) as http:
        keys.write_text("sk-new\n")
        keys.chmod(0o600)
        os.utime(keys, ns=(1, 1))
        old, new = [await http.get("/stats", headers={"X-Api-Key": key}) for key in ("sk-old", "sk-new")]
        keys.unlink()
        still = await http.get("/stats", headers={"X-Api-Key": "sk-new"})
    assert (old.status_code, new.status_code, still.status_code) == (401, 200, 200)


async def test_tenant_of_a_key_reaches_the_worker(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsk-one alice\nsk-new   alice  # the next one\nsk-two\n\n")
    keys.chmod(0o600)
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer, api_keys=str(keys)) as http:
        for key in ("sk-one", "sk-new", "sk-two"):
            assert (await http.post("/v1/completions", json=BODY, headers={"X-Api-Key": key})).status_code == 200
        for wrong in ("alice", "sk-one alice", "sk-"):
            assert (await http.get("/stats", headers={"X-Api-Key": wrong})).status_code == 401
    nameless = f"key-{hashlib.sha256(b'sk-two').hexdigest()[:8]}"
    assert [submitted.stream.submit.tenant for submitted in pool.submitted] == ["alice", "alice", nameless]


@pytest.mark.parametrize(("scope", "salts"), [
    ("all", ["", "s", "", "s"]), ("tenant", ["alice\n", "alice\ns", "bob\n", "bob\ns"]),
])  # fmt: skip
async def test_prefix_cache_scope_decides_whether_tenants_share_a_salt(
    tokenizer: Tokenizer, tmp_path: Path, scope: str, salts: list[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one alice\nsk-two bob\n")
    keys.chmod(0o600)
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer, api_keys=str(keys), prefix_cache_scope=scope) as http:
        for key in ("sk-one", "sk-two"):
            for more in ({}, {"cache_salt": "s"}):
                headers = {"X-Api-Key": key}
                assert (await http.post("/v1/completions", json=BODY | more, headers=headers)).status_code == 200
    assert [one.stream.submit.cache_salt for one in pool.submitted] == salts


async def test_prefix_cache_scope_covers_scores_and_checks_of_receipts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one alice\n")
    keys.chmod(0o600)
    pool, headers = completing(tokenizer), {"X-Api-Key": "sk-one"}
    async with http_client(pool, tokenizer, api_keys=str(keys), prefix_cache_scope="tenant") as http:
        asked = BODY | {"receipt": True}
        answered = (await http.post("/v1/completions", json=asked, headers=headers)).json()
        body = {"receipt": answered["choices"][0]["receipt"], "request": asked}
        checked = await http.post("/v1/receipts/verify", json=body, headers=headers)
        await http.post("/v1/logprobs", json={"prompt": "ab"}, headers=headers)  # the fake worker sends no scores
    assert checked.json()["identical"]
    sent = [one.stream.submit for one in pool.submitted]
    assert [(one.tenant, one.cache_salt) for one in sent] == [("alice", "alice\n")] * 3


async def test_invalid_key_line_is_named_and_a_running_server_keeps_its_keys(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one alice in wonderland\n")
    keys.chmod(0o600)
    with pytest.raises(ConfigError, match="line 1") as problem:
        app_over(FakePool(), tokenizer, api_keys=str(keys))
    assert "sk-one" not in str(problem.value)
    keys.write_text("sk-one alice\n")
    keys.chmod(0o600)
    async with http_client(FakePool(), tokenizer, api_keys=str(keys)) as http:
        keys.write_text("sk-two\nsk-three a/b\n")
        keys.chmod(0o600)
        for _ in range(2):
            assert (await http.get("/stats", headers={"X-Api-Key": "sk-one"})).status_code == 200
    assert caplog.text.count("line 2") == 1


async def test_key_file_without_keys_is_refused_at_start(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    for name in ("missing", "empty"):
        with pytest.raises(ConfigError, match="--api-keys"):
            app_over(FakePool(), tokenizer, api_keys=str(tmp_path / name))


async def test_ready_reports_progress(tokenizer: Tokenizer) -> None:
    loading = type(READY_STATUS)(0, 0, MODEL, "cpu", "float32", WorkerState.LOADING, 0.42)
    pool = FakePool(readiness=not_ready("loading 42%"), status=loading)
    async with http_client(pool, tokenizer) as http:
        answer, health = await http.get("/ready"), await http.get("/health")
        assert answer.json() == {"status": "not_ready", "reason": "loading 42%", "progress": 0.42}
        assert health.json() == {"status": "ok", "model_loaded": False}
        pool.readiness = READY
        assert (await http.get("/ready")).json() == {"status": "ready", "task": "generate", "chat": True}
        assert (await http.get("/health")).json() == {"status": "ok", "model_loaded": True}
        pool.readiness = DRAINING
        assert (await http.get("/health")).json() == {"status": "ok", "model_loaded": True}


async def test_playground_page_loads_nothing_from_elsewhere(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        page = await http.get("/")
    assert page.headers["content-type"].startswith("text/html") and "://" not in page.text
