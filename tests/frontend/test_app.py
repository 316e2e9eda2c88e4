"""The HTTP surface: routes, errors, keys, limits. Streams over real sockets are in test_app_streams."""

import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.errors import Overloaded, Unprocessable
from frontend.text.tokenizer import Tokenizer
from frontend.workers.status import DRAINING, READY, not_ready
from shared.config import ConfigError
from shared.messages import Outcome, WorkerState
from tests.fakes import MODEL, READY_STATUS, FakePool, saying
from tests.frontend.serving import app_over

BODY = {"model": MODEL, "prompt": "abc", "max_tokens": 8}


@asynccontextmanager
async def client(link: FakePool, tokenizer: Tokenizer | None, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app_over(link, tokenizer, **config))
    async with httpx.AsyncClient(transport=transport, base_url="http://sluice") as http:
        yield http


def play(tokenizer: Tokenizer, text: str = "hello", outcome: Outcome = Outcome.LENGTH) -> FakePool:
    return FakePool(saying(tokenizer.encode_now([text], False)[0], outcome=outcome))


async def test_a_completion_in_one_piece(tokenizer: Tokenizer) -> None:
    async with client(play(tokenizer), tokenizer) as http:
        answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion" and body["model"] == MODEL
    assert body["choices"] == [
        {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length", "stop_reason": None, "seed": 77}
    ]
    assert body["usage"]["completion_tokens"] == len(tokenizer.encode_now(["hello"], False)[0])


async def test_the_body_or_the_server_chooses_the_dialect(tokenizer: Tokenizer) -> None:
    async with client(play(tokenizer), tokenizer) as http:
        asked = await http.post("/v1/completions", json=BODY | {"stream_format": "events"})
    async with client(play(tokenizer), tokenizer, completions_stream_format="events") as http:
        default = await http.post("/v1/completions", json=BODY)
        other = await http.post("/v1/completions", json=BODY | {"stream_format": "openai"})
    assert asked.text == default.text and asked.text.count("event: done\n") == 1
    assert asked.headers["content-type"].startswith("text/event-stream")
    assert other.json()["choices"][0]["text"] == "hello"


async def test_stream_headers(tokenizer: Tokenizer) -> None:
    async with client(play(tokenizer), tokenizer) as http:
        answer = await http.post("/v1/completions", json=BODY | {"stream": True})
    assert answer.headers["cache-control"] == "no-store" and answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"] and answer.text.endswith("data: [DONE]\n\n")


async def test_every_answer_has_a_request_id_and_keeps_a_sane_one(tokenizer: Tokenizer) -> None:
    async with client(FakePool(), tokenizer) as http:
        ids = [(await http.get(path)).headers["x-request-id"] for path in ("/health", "/nowhere", "/stats")]
        own = await http.get("/health", headers={"X-Request-Id": "abc-1"})
        odd = await http.get("/health", headers={"X-Request-Id": "a b"})
    assert len(set(ids)) == 3
    assert own.headers["x-request-id"] == "abc-1" and odd.headers["x-request-id"] != "a b"


# the table of errors


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
async def test_refusals_before_the_stream(
    tokenizer: Tokenizer, content: bytes, status: int, kind: str, param: str | None
) -> None:
    link = FakePool()
    async with client(link, tokenizer) as http:
        answer = await http.post("/v1/completions", content=content)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (status, kind, param)
    assert set(error) == {"message", "type", "param", "code"} and link.calls == 0


async def test_typed_events_have_their_own_envelope(tokenizer: Tokenizer) -> None:
    async with client(FakePool(), tokenizer) as http:
        answer = await http.post("/v1/completions", json=BODY | {"stream_format": "events", "temperature": -1})
    assert answer.status_code == 422 and list(answer.json()) == ["error"] and "temperature" in answer.json()["error"]


async def test_unknown_routes_and_methods(tokenizer: Tokenizer) -> None:
    async with client(FakePool(), tokenizer) as http:
        missing, wrong = await http.post("/v1/nowhere"), await http.get("/v1/completions")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "not_found_error")
    assert (wrong.headers["allow"], "allow" in missing.headers) == ("POST", False)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413(tokenizer: Tokenizer, chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 100

    async with client(FakePool(), tokenizer, max_body_bytes=999) as http:
        answer = await http.post("/v1/completions", content=pieces() if chunked else b" " * 1000)
        fits = await http.post("/v1/completions", content=b" " * 999)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    assert fits.status_code == 400


@pytest.mark.parametrize(("after", "header"), [(0.0, "1"), (2.1, "3")])
async def test_a_full_queue_is_503_with_retry_after(tokenizer: Tokenizer, after: float, header: str) -> None:
    link = FakePool(refusals={0: Overloaded("the queue is full", code="queue_full", retry_after=after)})
    async with client(link, tokenizer) as http:
        answer = await http.post("/v1/completions", json=BODY | {"stream": True})
        metrics = (await http.get("/metrics")).text
    assert (answer.status_code, answer.headers["retry-after"]) == (503, header)
    assert answer.json()["error"]["type"] == "overloaded_error"
    assert 'sluice_rejected_total{reason="queue_full"} 1.0' in metrics


async def test_without_worker_or_tokenizer_it_is_503(tokenizer: Tokenizer) -> None:
    for link, loaded in ((FakePool(readiness=not_ready("worker lost")), tokenizer), (FakePool(), None)):
        async with client(link, loaded) as http:
            answer = await http.post("/v1/completions", json=BODY)
            health = await http.get("/health")
            ready = await http.get("/ready")
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert health.status_code == 200 and health.json()["status"] == "ok"
        assert ready.status_code == 503 and ready.json()["status"] == "not_ready"


async def test_the_worker_may_refuse_for_good(tokenizer: Tokenizer) -> None:
    link = FakePool(refusals={0: Unprocessable("too long", code="context_length_exceeded")})
    async with client(link, tokenizer) as http:
        answer = await http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "context_length_exceeded")


async def test_a_failed_step_is_500_in_one_piece(tokenizer: Tokenizer) -> None:
    async with client(play(tokenizer, outcome=Outcome.ERROR), tokenizer) as http:
        answer = await http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "internal_error")


async def test_our_own_mistake_is_500_with_an_id_and_a_trace(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(link: FakePool, stream: object) -> None:
        raise ZeroDivisionError("secret")

    async with client(FakePool(broken), tokenizer) as http:
        answer = await http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "find-me"})
    assert answer.status_code == 500 and "secret" not in answer.text
    assert "find-me" in answer.json()["error"]["message"]
    record = next(record for record in caplog.records if "find-me" in record.getMessage())
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError


# queuing


@pytest.mark.parametrize("path", ["completions", "chat/completions", "messages", "responses"])
async def test_priority_deadline_and_salt_go_along_in_all_dialects(tokenizer: Tokenizer, path: str) -> None:
    link = play(tokenizer)
    turn = {"messages": [{"role": "user", "content": "hi"}], "model": MODEL, "max_tokens": 8}
    asked = {"completions": BODY, "responses": {"model": MODEL, "input": "hi", "max_output_tokens": 8}}
    body = asked.get(path, turn) | {"priority": -3, "deadline_ms": 60_000, "cache_salt": "s"}
    async with client(link, tokenizer) as http:
        answers = [
            await http.post(f"/v1/{path}", json=body | odd)
            for odd in ({}, {"deadline_ms": 0}, {"priority": 1.5}, {"cache_salt": ""})
        ]
    assert [answer.status_code for answer in answers] == [200, 422, 400, 422]
    assert "deadline_ms" in answers[1].text and "priority" in answers[2].text
    (one,) = link.submitted
    submit = one.stream.submit
    assert (submit.priority, submit.cache_salt) == (-3, "s") and 59_000 < submit.deadline_ms <= 60_000


@pytest.mark.parametrize(("path", "kind"), [("completions", "timeout_error"), ("messages", "timeout_error")])
async def test_a_deadline_is_504_before_the_headers_and_an_error_after(
    tokenizer: Tokenizer, path: str, kind: str
) -> None:
    link = FakePool(lambda link, stream: link.say(stream, [65]))  # and never ends: a worker that hangs, or is lost
    body = {"model": MODEL, "max_tokens": 8, "deadline_ms": 50}
    body |= {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    async with client(link, tokenizer) as http:
        whole = await http.post(f"/v1/{path}", json=body)
        streamed = await http.post(f"/v1/{path}", json=body | {"stream": True})
        metrics = (await http.get("/metrics")).text
    assert (whole.status_code, whole.json()["error"]["type"]) == (504, kind)
    assert whole.headers["x-should-retry"] == "false", "the SDKs' word for: do not try again by yourself"
    assert streamed.status_code == 200 and kind in streamed.text
    assert "[DONE]" not in streamed.text and "message_stop" not in streamed.text
    assert len(link.aborted) == 2
    assert 'sluice_aborts_total{reason="deadline_exceeded"} 2.0' in metrics


async def test_a_deadline_holds_while_the_worker_has_not_admitted_it(tokenizer: Tokenizer) -> None:
    link = FakePool(delays={0: 60.0, 1: 60.0})
    async with client(link, tokenizer) as http:
        began = time.perf_counter()
        answer = await http.post("/v1/completions", json=BODY | {"deadline_ms": 50, "n": 2})
        metrics = (await http.get("/metrics")).text
    assert answer.status_code == 504 and time.perf_counter() - began < 10.0
    assert 'sluice_aborts_total{reason="deadline_exceeded"} 2.0' in metrics


# keys


async def test_keys_guard_every_route_that_holds_data(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsk-one\n\nsk-two\n")
    async with client(play(tokenizer), tokenizer, api_keys=str(keys)) as http:
        for path in ("/stats", "/metrics", "/v1/models", "/nowhere"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert (await http.post("/v1/completions", json=BODY)).status_code == 401
        assert (await http.get("/health")).status_code == (await http.get("/ready")).status_code == 200
        page = [(await http.get(path)).status_code for path in ("/", "/web/main.js", "/web/..%2fstats", "/web/x.js")]
        assert page == [200, 200, 404, 404]  # a browser can send no key with it
        good = {"Authorization": "Bearer sk-one"}, {"authorization": "bearer sk-two"}, {"X-Api-Key": "sk-one"}
        bad = {"Authorization": "Bearer # ours"}, {"Authorization": "sk-one"}, {"X-Api-Key": ""}
        assert [(await http.get("/stats", headers=headers)).status_code for headers in good] == [200] * 3
        assert [(await http.get("/stats", headers=headers)).status_code for headers in bad] == [401] * 3


async def test_a_changed_file_of_keys_counts_at_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-old\n")
    async with client(FakePool(), tokenizer, api_keys=str(keys)) as http:
        keys.write_text("sk-new\n")
        os.utime(keys, ns=(1, 1))
        old, new = [await http.get("/stats", headers={"X-Api-Key": key}) for key in ("sk-old", "sk-new")]
        keys.unlink()
        still = await http.get("/stats", headers={"X-Api-Key": "sk-new"})
    assert (old.status_code, new.status_code, still.status_code) == (401, 200, 200)


async def test_a_key_has_a_name_which_goes_with_its_requests(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsk-one alice\nsk-new   alice  # the next one\nsk-two\n\n")
    link = play(tokenizer)
    async with client(link, tokenizer, api_keys=str(keys)) as http:
        for key in ("sk-one", "sk-new", "sk-two"):
            assert (await http.post("/v1/completions", json=BODY, headers={"X-Api-Key": key})).status_code == 200
        for wrong in ("alice", "sk-one alice", "sk-"):
            assert (await http.get("/stats", headers={"X-Api-Key": wrong})).status_code == 401
    nameless = f"key-{hashlib.sha256(b'sk-two').hexdigest()[:8]}"
    assert [one.stream.submit.tenant for one in link.submitted] == ["alice", "alice", nameless]


async def test_a_line_that_is_no_key_and_name_is_named_and_a_running_server_keeps_its_keys(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one alice in wonderland\n")
    with pytest.raises(ConfigError, match="line 1") as problem:
        app_over(FakePool(), tokenizer, api_keys=str(keys))
    assert "sk-one" not in str(problem.value)
    keys.write_text("sk-one alice\n")
    async with client(FakePool(), tokenizer, api_keys=str(keys)) as http:
        keys.write_text("sk-two\nsk-three a/b\n")
        for _ in range(2):
            assert (await http.get("/stats", headers={"X-Api-Key": "sk-one"})).status_code == 200
    assert caplog.text.count("line 2") == 1


async def test_a_file_without_keys_is_a_mistake_at_start(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    for name in ("missing", "empty"):
        with pytest.raises(ConfigError, match="--api-keys"):
            app_over(FakePool(), tokenizer, api_keys=str(tmp_path / name))


# the small routes


async def test_models(tokenizer: Tokenizer) -> None:
    async with client(FakePool(), tokenizer) as http:
        listing = (await http.get("/v1/models")).json()
        one = (await http.get(f"/v1/models/{MODEL}")).json()
        other = await http.get("/v1/models/org/other")
    ends = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
    assert listing == {"object": "list", "data": [one], **ends}
    assert (one["id"], one["object"], one["max_model_len"]) == (MODEL, "model", 512)
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


async def test_nobody_claims_a_length_before_a_worker_has_told_it(tokenizer: Tokenizer) -> None:
    link = FakePool(readiness=not_ready("loading 42%"), welcome=None)
    async with client(link, tokenizer) as http:
        paths = ("/v1/models", f"/v1/models/{MODEL}")
        (listing, one) = [(await http.get(path)).json() for path in paths]
        counted = (await http.post("/tokenize", json={"prompt": "ab"})).json()
    assert [it["max_model_len"] for it in (*listing["data"], one, counted)] == [None] * 3
    assert counted["count"] > 0


async def test_ready_tells_progress(tokenizer: Tokenizer) -> None:
    loading = type(READY_STATUS)(0, 0, MODEL, "cpu", "float32", WorkerState.LOADING, 0.42)
    link = FakePool(readiness=not_ready("loading 42%"), status=loading)
    async with client(link, tokenizer) as http:
        answer, health = await http.get("/ready"), await http.get("/health")
        assert answer.json() == {"status": "not_ready", "reason": "loading 42%", "progress": 0.42}
        assert health.json() == {"status": "ok", "model_loaded": False}
        link.readiness = READY
        assert (await http.get("/ready")).json() == {"status": "ready"}
        assert (await http.get("/health")).json() == {"status": "ok", "model_loaded": True}
        link.readiness = DRAINING
        assert (await http.get("/health")).json() == {"status": "ok", "model_loaded": True}


async def test_stats_have_one_shape_with_and_without_a_worker(tokenizer: Tokenizer) -> None:
    def shape(value: Any) -> Any:
        return {key: shape(inner) for key, inner in value.items()} if isinstance(value, dict) else type(value)

    async with client(FakePool(), tokenizer) as http:
        there = (await http.get("/stats")).json()
    async with client(FakePool(status=None, welcome=None, readiness=not_ready("no worker yet")), tokenizer) as http:
        absent = (await http.get("/stats")).json()
    assert shape(there) == shape(absent)
    assert there["pages"] == {"free": 6, "cached": 3, "owned": 1, "total": 10}
    assert (there["running"], there["waiting"], there["prefix"]) == (2, 1, {"queries": 100, "hits": 40})
    assert there["speculation"] == {"drafted": 9, "accepted": 5}
    assert there["worker"]["pid"] == 4711 and there["frontends"] == [{"pid": 12, "id": "ab", "streams": 3}]
    assert absent["frontends"] == [] and absent["running"] == 0 and absent["draining"] is False


async def test_tokenize_and_back(tokenizer: Tokenizer) -> None:
    async with client(FakePool(readiness=not_ready("worker lost")), tokenizer) as http:
        text = (await http.post("/tokenize", json={"prompt": "the €"})).json()
        bare = (await http.post("/tokenize", json={"prompt": "the €", "add_special_tokens": False})).json()
        back = (await http.post("/detokenize", json={"tokens": bare["tokens"]})).json()
        chat = (await http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
        both = await http.post("/tokenize", json={"prompt": "a", "messages": []})
        outside = await http.post("/detokenize", json={"tokens": [269]})
    assert text["tokens"] == [264, *bare["tokens"]] and text["count"] == len(text["tokens"])
    assert back == {"prompt": "the €"}
    assert tokenizer.decode(chat["tokens"]) == "<user>hi\n<assistant>"
    assert (both.status_code, outside.status_code) == (400, 422)


async def test_the_page_needs_nothing_from_outside(tokenizer: Tokenizer) -> None:
    async with client(FakePool(), tokenizer) as http:
        page = await http.get("/")
    assert page.headers["content-type"].startswith("text/html") and "://" not in page.text
