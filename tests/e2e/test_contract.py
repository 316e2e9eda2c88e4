"""The HTTP contract, row by row, on a real server: fields, streams, refusals, statistics, metrics."""

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.contract import (
    ALL,
    CHAT,
    COMPLETIONS,
    FIELDS,
    GREEDY,
    KEY,
    LEAST,
    LENGTH,
    LONG,
    MESSAGES,
    MOST_BYTES,
    OPENAI,
    QUESTION,
    Row,
    Site,
)
from tests.e2e.server import free_port, serving
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, port = tmp_path_factory.mktemp("contract"), free_port()
    (folder / "keys").write_text(f"{KEY}\n")
    (folder / "keys").chmod(0o600)
    flags = ["--max-seq-len", str(LENGTH), "--worker-metrics-port", str(port), "--frontends", "2"]
    flags += ["--api-keys", str(folder / "keys"), "--max-body-bytes", str(MOST_BYTES)]
    with serving("demo", folder / "log", *flags) as server:
        yield Site(server, f"http://127.0.0.1:{port}/metrics")


@pytest.mark.parametrize(
    ("row", "route"), [pytest.param(row, route, id=f"{row.name} {route}") for row in FIELDS for route in row.routes]
)
def test_field_set_changes_answer_as_documented(site: Site, row: Row, route: str) -> None:
    plain, changed = site.ask(route, row.base), site.ask(route, row.base | row.fields)
    assert row.true(plain, changed), f"{plain}\n{changed}"


def test_logprobs_with_echo_cover_prompt_and_answer(site: Site) -> None:
    asked = {**GREEDY, "logprobs": 2, "echo": True, "max_tokens": 2}
    columns = site.ask(COMPLETIONS, asked).told["choices"][0]["logprobs"]
    assert "".join(columns["tokens"]) == "The capital of France is Paris."
    assert columns["token_logprobs"][0] is None and all(score <= 0 for score in columns["token_logprobs"][1:])
    tops = list(zip(columns["tokens"], columns["top_logprobs"], strict=True))[1:]
    assert len(tops) == 6 and all(token in top and len(top) in (2, 3) for token, top in tops)
    assert columns["text_offset"] == [0, 3, 11, 14, 21, 24, 30]
    asked = {**GREEDY, "logprobs": True, "top_logprobs": 3}
    [first, *_] = site.ask(CHAT, asked).told["choices"][0]["logprobs"]["content"]
    assert [first["token"], first["top_logprobs"][0]["token"], len(first["top_logprobs"])] == ["The", "The", 3]


def test_prefix_cache_repeated_prompt_is_reported_in_usage(site: Site) -> None:
    prompt = {**GREEDY, "prompt": list(range(300, 400)), "max_tokens": 1, "timings": True}
    details = [site.ask(COMPLETIONS, prompt).told["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert details == [{"cached_tokens": 0}, {"cached_tokens": 96}], "three pages of 32"
    salted = [site.ask(COMPLETIONS, prompt | {"cache_salt": salt}).told["timings"]["cached_tokens"] for salt in "aab"]
    assert salted == [0, 96, 0]


# Streams


def events(said: httpx.Response) -> list[tuple[str, Any]]:
    """Returns the stream as (event name, data); OpenAI's events have no name."""
    assert said.status_code == 200 and said.headers["content-type"].startswith("text/event-stream")
    assert (said.headers["cache-control"], said.headers["x-accel-buffering"]) == ("no-store", "no")
    assert said.headers["x-request-id"]
    found = re.findall(r"(?:event: (.*)\n)?data: (.*)\n\n", said.text)
    return [(name, data if data == "[DONE]" else json.loads(data)) for name, data in found]


@pytest.mark.parametrize("route", OPENAI)
def test_openai_stream_equals_unstreamed_answer(site: Site, route: str) -> None:
    whole = site.ask(route, GREEDY)
    asked = LEAST[route] | GREEDY | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = [data for _, data in events(site.post(route, asked))]
    assert (done, last["choices"], last["usage"]["completion_tokens"]) == ("[DONE]", [], whole.tokens)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(chunks) - 1) + [whole.finish]
    if route == CHAT:
        assert choices[0]["delta"]["role"] == "assistant"
    pieces = [choice["delta"].get("content") or "" if route == CHAT else choice["text"] for choice in choices]
    assert "".join(pieces) == whole.text
    plain = [data for _, data in events(site.post(route, asked | {"stream_options": None}))]
    assert all(chunk == "[DONE]" or (chunk["choices"] and "usage" not in chunk) for chunk in plain)
    running = asked | {"stream_options": {"continuous_usage_stats": True}}
    *counted, _ = [data for _, data in events(site.post(route, running))]
    assert counted[-1]["usage"]["completion_tokens"] == whole.tokens and all("usage" in chunk for chunk in counted[1:])


def test_anthropic_stream_equals_unstreamed_answer(site: Site) -> None:
    whole = site.ask(MESSAGES, GREEDY)
    said = events(site.post(MESSAGES, LEAST[MESSAGES] | GREEDY | {"stream": True}))
    assert all(name == data["type"] for name, data in said)
    names = [name for name, _ in said]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert "".join(data["delta"]["text"] for _, data in said[3:-3]) == whole.text
    assert said[0][1]["message"]["usage"]["input_tokens"] == whole.prompt
    assert said[-2][1]["delta"]["stop_reason"] == "end_turn"
    assert said[-2][1]["usage"]["output_tokens"] == whole.tokens


@pytest.mark.parametrize(
    ("fields", "reason", "text"),
    [
        (GREEDY, "eos", " Paris. France is in Europe."),
        ({**GREEDY, "stop": ["France"]}, "stop", " Paris. "),
        ({**LONG, "max_tokens": 5, "stream": False}, "length", " Paris. France is in"),
    ],
)
def test_typed_events_end_with_finish_reason_and_usage(
    site: Site, fields: dict[str, Any], reason: str, text: str
) -> None:
    asked = LEAST[COMPLETIONS] | fields | {"stream_format": "events"}
    *tokens, (name, done) = events(site.post(COMPLETIONS, asked))
    assert {name for name, _ in tokens} == {"token"} and all(set(data) == {"token", "token_id"} for _, data in tokens)
    assert "".join(data["token"] for _, data in tokens) == text
    usage = {"prompt_tokens": 5, "completion_tokens": len(tokens), "total_tokens": 5 + len(tokens)}
    assert (name, done) == ("done", {"finish_reason": reason, "usage": usage})


# refusals


BAD = "invalid_request_error"
SHARED: list[tuple[str, dict[str, Any] | bytes, int, str, str]] = [
    # (name, change of the body or the whole body, status on /v1/completions, error type of OpenAI, of Anthropic)
    ("no JSON", b'{"model', 400, BAD, BAD),
    ("no object", b"[]", 400, BAD, BAD),
    ("max_tokens", {"max_tokens": "8"}, 400, BAD, BAD),
    ("temperature", {"temperature": "hot"}, 400, BAD, BAD),
    ("stream", {"stream": 1}, 400, BAD, BAD),
    ("model", {"model": "other"}, 422, BAD, "not_found_error"),
    ("max_tokens", {"max_tokens": 0}, 422, BAD, BAD),
    ("temperature", {"temperature": -0.1}, 422, BAD, BAD),
    ("top_p", {"top_p": -0.1}, 422, BAD, BAD),
    ("top_p", {"top_p": 1.5}, 422, BAD, BAD),
    ("top_k", {"top_k": -2}, 422, BAD, BAD),
    ("stop_token_ids", {"stop_token_ids": [99_999]}, 422, BAD, BAD),
    ("larger", b" " * (MOST_BYTES + 1), 413, BAD, "request_too_large"),
]
EMPTY: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [{"prompt": ""}, {"prompt": []}, {"prompt": [""]}],
    CHAT: [{"messages": []}],
    MESSAGES: [{"messages": []}],
}
OWN: dict[str, list[tuple[str, Any]]] = {
    COMPLETIONS: [
        ("best_of", 2), ("suffix", "x"), ("logprobs", 21), ("n", 0), ("min_p", 2), ("logit_bias", {"x": 1}),
        ("tools", []), ("messages", QUESTION), ("stop", ["x" * 16_385]), ("stop_sequences", ["x"]), ("top_logprobs", 1),
        ("foo", "bar"), ("foo", None), ("stream_options", {"foo": True}), ("stream_options", {"include_usage": True}),
        ("kv_transfer_params", {}), ("prompt_embeds", "x"), ("stop_regex", "x"), ("detokenize", False), ("top_p", 0),
    ],
    CHAT: [
        ("top_logprobs", 2), ("n", 129), ("presence_penalty", 3), ("functions", [1]), ("modalities", ["audio"]),
        ("tools", [{"type": "function", "function": {"name": "a b"}}]), ("response_format", {"type": "xml"}),
    ],
    MESSAGES: [("stop_sequences", ["x" * 16_385]), ("container", "x"), ("speed", "fast"), ("mcp_servers", [{}])],
}  # fmt: skip


def status_on(route: str, status: int, name: str = "") -> int:
    """Returns the status on this route for a refusal that is `status` on `/v1/completions`: only that route has 422."""
    if route == COMPLETIONS or status != 422:
        return status
    return 404 if name == "model" else 400


def refused(said: httpx.Response, route: str, status: int, openai: str, anthropic: str) -> dict[str, Any]:
    """Checks the error envelope of the route's API format and returns the error."""
    assert said.status_code == status, said.text
    told = said.json()
    if route == MESSAGES:
        assert set(told) == {"type", "error", "request_id"} and told["type"] == "error"
        assert told["request_id"] == said.headers["x-request-id"] and told["error"]["type"] == anthropic
    else:
        assert set(told["error"]) == {"message", "type", "param", "code"} and told["error"]["type"] == openai
    return dict(told["error"])


@pytest.mark.parametrize("route", ALL)
@pytest.mark.parametrize(("what", "change", "status", "openai", "anthropic"), SHARED)
def test_invalid_body_is_refused_in_format_of_route(
    site: Site, route: str, what: str, change: dict[str, Any] | bytes, status: int, openai: str, anthropic: str
) -> None:
    body = change if isinstance(change, bytes) else LEAST[route] | change
    error = refused(site.post(route, body), route, status_on(route, status, what), openai, anthropic)
    if isinstance(change, dict):
        assert f"`{what}`" in error["message"]
    typed = body if isinstance(body, bytes) else body | {"stream_format": "events"}
    if route == COMPLETIONS and isinstance(typed, dict):
        said = site.post(route, typed)
        assert (said.status_code, said.json()) == (status, {"error": error["message"]})


@pytest.mark.parametrize(("route", "change"), [(route, change) for route in ALL for change in EMPTY[route]])
def test_prompt_empty_is_refused_with_400(site: Site, route: str, change: dict[str, Any]) -> None:
    refused(site.post(route, LEAST[route] | change), route, 400, BAD, BAD)


@pytest.mark.parametrize(("route", "name", "value"), [(route, *one) for route in ALL for one in OWN[route]])
def test_field_that_format_does_not_support_is_refused_by_name(site: Site, route: str, name: str, value: Any) -> None:
    error = refused(site.post(route, LEAST[route] | {name: value}), route, status_on(route, 422), BAD, BAD)
    assert f"`{name}" in error["message"]


def test_routes_refuse_missing_key_wrong_key_and_wrong_method(site: Site) -> None:
    client = site.server.client
    for route in (*ALL, "/v1/messages/count_tokens", "/tokenize", "/detokenize"):
        words = MESSAGES if route.startswith(MESSAGES) else route
        kind = "authentication_error"
        refused(client.post(route, json={}), words, 401, kind, kind)
        refused(site.post(route, {}, key="sk-wrong"), words, 401, kind, kind)
        refused(site.get(route), words, 405, "not_found_error", "not_found_error")
    for route in ("/stats", "/metrics", "/v1/models", "/v1/models/m", "/openapi.json", "/tokenizer_info"):
        refused(client.get(route), route, 401, kind, kind)
        assert site.get(route).status_code == 200
        refused(site.post(route, {}), route, 405, "not_found_error", "not_found_error")
    refused(site.get("/nowhere"), "", 404, "not_found_error", "")
    refused(site.get("/v1/models/other"), "", 404, "not_found_error", "")
    assert client.get("/health").json() == {"status": "ok", "model_loaded": True}
    assert client.get("/ready").status_code == client.get("/").status_code == 200


# counting


def test_model_list_and_token_counts_agree_across_routes(site: Site) -> None:
    (listed,), model = site.get("/v1/models").json()["data"], site.get("/v1/models/m").json()
    own = {"created", "created_at"}  # these fields differ, because each frontend reports its own start
    assert {name: listed[name] for name in listed.keys() - own} == {name: model[name] for name in model.keys() - own}
    assert listed.keys() == model.keys() and abs(listed["created"] - model["created"]) < PATIENCE_S
    assert (model["id"], model["object"], model["max_model_len"]) == ("m", "model", LENGTH)
    tokens = site.post("/tokenize", {"prompt": "Once upon a time"}).json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == LENGTH
    text = "Once upon a time"
    told = {"prompt": text, "content": text, "text": text}
    assert site.post("/detokenize", {"tokens": tokens["tokens"]}).json() == told
    counted = site.post("/v1/messages/count_tokens", {"model": "m", "messages": QUESTION}).json()["input_tokens"]
    assert counted == site.post("/tokenize", {"messages": QUESTION}).json()["count"] == site.ask(CHAT, {}).prompt


def test_stats_report_pages_worker_frontends_and_latency(site: Site) -> None:
    site.ask(COMPLETIONS, LONG)
    stats = site.get("/stats").json()
    assert (stats["running"], stats["waiting"], stats["waiting_tokens"], stats["draining"]) == (0, 0, 0, False)
    pages = stats["pages"]
    assert pages["free"] + pages["cached"] + pages["owned"] == pages["total"] > 0 == pages["owned"]
    assert 0 <= stats["prefix"]["hits"] <= stats["prefix"]["queries"] > 0
    worker = stats["worker"]
    assert psutil.pid_exists(worker["pid"]) and worker["epoch"] == 1 and 0 <= worker["last_step_age_s"] < PATIENCE_S
    assert (worker["model"], worker["device"], worker["dtype"], worker["max_seq_len"]) == (
        "m",
        "cpu",
        "bfloat16",
        LENGTH,
    )
    assert worker["step"]["target_s"] > 0 and 0 < worker["step"]["decodes_s"] < PATIENCE_S
    assert worker["step"]["prompt_tokens"] >= 64
    assert len({frontend["pid"] for frontend in stats["frontends"]}) == len(stats["frontends"]) == 2
    assert all(set(frontend) == {"pid", "id", "streams"} for frontend in stats["frontends"])
    assert stats["throughput"]["prompt"] > 0 and stats["throughput"]["generation"] > 0
    assert set(stats["latency"]) == {"ttft", "itl", "e2e"}
    for quantiles in stats["latency"].values():
        assert 0 < quantiles["p50"] <= quantiles["p95"] <= quantiles["p99"]


FRONTENDS = {
    "prompt_tokens_total": "counter", "generation_tokens_total": "counter", "request_success_total": "counter",
    "rejected_total": "counter", "time_to_first_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram", "workers": "gauge", "workers_ready": "gauge",
    "inter_token_latency_seconds": "histogram", "frontend_loop_lag_seconds": "histogram", "bus_gaps_total": "counter",
    "resyncs_total": "counter", "streams_resumed_total": "counter", "streams_lost_total": "counter",
    "aborts_total": "counter",
}  # fmt: skip
WORKERS = {
    "num_requests_running": "gauge", "num_requests_waiting": "gauge", "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries_total": "counter", "prefix_cache_hits_total": "counter",
    "prefill_tokens_total": "counter", "sampled_tokens_total": "counter", "request_failed_total": "counter",
    "submits_rejected_total": "counter", "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram", "request_decode_time_seconds": "histogram",
    "worker_epoch": "gauge", "worker_last_step_age_seconds": "gauge",
    "num_preemptions_total": "counter", "iteration_tokens_total": "histogram", "step_duration_seconds": "histogram",
    "leases_reaped_total": "counter",
}  # fmt: skip


def test_metrics_have_documented_names_and_types(site: Site) -> None:
    frontends, worker = site.get("/metrics").text, httpx.get(site.worker_metrics, timeout=PATIENCE_S).text
    exported = []
    for text, names in ((frontends, FRONTENDS), (worker, WORKERS)):
        kinds = dict(re.findall(r"^# TYPE sluice_(\w+) (\w+)$", text, re.MULTILINE))
        assert {name: kinds.get(name) for name in names} == names
        exported.append(kinds.keys())
    assert exported[0] & exported[1] == {"build_info"}, "a sum over all targets would count something twice"
    reasons = re.findall(r'sluice_request_success_total{finished_reason="(\w+)",model_name="m"}', frontends)
    assert set(reasons) == {"eos", "stop", "length", "pooled", "checked"}
    assert 'sluice_rejected_total{model_name="m",reason="queue_full"} 0.0' in frontends
    assert 'sluice_submits_rejected_total{model_name="m",reason="queue_full"} 0.0' in worker
    assert set(re.findall(r'sluice_step_duration_seconds_count{model_name="m",part="(\w+)"}', worker)) == {
        "plan",
        "run",
    }
    assert 'sluice_aborts_total{model_name="m",reason="client"} 0.0' in frontends


def test_metrics_of_any_frontend_sum_all_frontends(site: Site) -> None:
    def generated() -> set[float]:
        texts = [site.get("/metrics").text for _ in range(16)]
        return {float(*re.findall(r"^sluice_generation_tokens_total{.*} (\S+)$", text, re.MULTILINE)) for text in texts}

    def agreed(true: Callable[[float], bool] = lambda count: True) -> float:
        deadline = time.monotonic() + PATIENCE_S
        while len(counts := generated()) > 1 or not true(max(counts)):
            assert time.monotonic() < deadline, counts
            time.sleep(0.1)
        return counts.pop()

    time.sleep(1.5)  # frontends exchange their counts once a second
    before = agreed()
    site.ask(COMPLETIONS, {**LONG, "max_tokens": 100})
    assert agreed(lambda count: count >= before + 100) == before + 100
