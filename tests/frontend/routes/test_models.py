"""/v1/models, and the lengths that it states before a worker is known."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.app import create_app
from frontend.model_table import ModelTable, ServedModel
from frontend.observability.metrics import PrometheusMetrics
from frontend.text.tokenizer import Tokenizer
from frontend.workers.status import ConnectionState, WorkerStatus, not_ready
from shared.config.frontend import FrontendConfig
from tests.fakes import MODEL, READY_STATUS, FakePool, sending
from tests.frontend.serving import http_client


async def test_models_lists_the_served_model(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        listing = (await http.get("/v1/models")).json()
        one = (await http.get(f"/v1/models/{MODEL}")).json()
        other = await http.get("/v1/models/org/other")
        sdk = {"anthropic-version": "2023-06-01"}  # Anthropic's SDK, which has another meaning of `capabilities`
        claude = [(await http.get(path, headers=sdk)).json() for path in (f"/v1/models/{MODEL}", "/v1/models")]
    assert claude[0] == claude[1]["data"][0] == one | {"capabilities": None} and one["lifecycle"] == "active"
    theirs = {"name": MODEL, "model": MODEL, "capabilities": ["completion"]}  # fields for llama.cpp's clients
    ends = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
    assert listing == {"object": "list", "data": [one], "models": [theirs], **ends}
    assert (one["id"], one["object"], one["max_model_len"]) == (MODEL, "model", 512)
    assert one["capabilities"] == ["completion", "tools"]
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


async def test_path_names_the_model_and_is_not_listed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    loading: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
    loading.set_result(tokenizer)
    config, metrics = FrontendConfig(access_log="off", allowed_hosts="*"), PrometheusMetrics()
    names, pool = ("short", "also", str(tmp_path)), FakePool(sending([104]))
    table = ModelTable([ServedModel.of(names, config, pool, loading, metrics.models[""])])  # type: ignore[arg-type]
    transport = httpx.ASGITransport(create_app(config, table, metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://sluice") as http:
        lists = ("/v1/models", "/models", "/api/tags", "/api/ps", "/props", "/model_info", "/server_info")
        texts = [(await http.get(path)).text for path in lists]
        shown = (await http.post("/api/show", json={"model": str(tmp_path)})).text
        body = {"prompt": "hi", "max_tokens": 4, "model": str(tmp_path)}
        answers = [await http.post("/v1/completions", json=body), await http.get(f"/v1/models/{tmp_path}")]
    assert [one["id"] for one in json.loads(texts[0])["data"]] == ["short", "also"]
    assert not [text for text in (*texts, shown) if str(tmp_path) in text]
    assert [one.status_code for one in answers] == [200, 200] and answers[0].json()["model"] == "short"


async def test_models_have_no_length_before_a_worker_is_known(tokenizer: Tokenizer) -> None:
    pool = FakePool(readiness=not_ready("loading 42%"), welcome=None)
    async with http_client(pool, tokenizer) as http:
        paths = ("/v1/models", f"/v1/models/{MODEL}")
        (listing, one) = [(await http.get(path)).json() for path in paths]
        counted = (await http.post("/tokenize", json={"prompt": "ab"})).json()
    assert [it["max_model_len"] for it in (*listing["data"], one, counted)] == [None] * 3
    assert counted["count"] > 0


async def test_any_model_name_is_accepted_on_demand(tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "model": "gpt"}
    for any_name, status in ((True, 200), (False, 404)):
        async with http_client(FakePool(sending([104])), tokenizer, any_model_name=any_name) as http:
            answers = [await http.post("/v1/chat/completions", json=body), await http.get("/v1/models/gpt")]
        assert [answer.status_code for answer in answers] == [status, status]
        assert not any_name or (answers[0].json()["model"], answers[1].json()["id"]) == (MODEL, "gpt")


@pytest.mark.parametrize(
    ("states", "value"),
    [
        (["READY"], "loaded"),
        (["STALLED"], "loaded"),
        (["LOADING"], "loading"),
        (["HANDSHAKE"], "loading"),
        (["LOST"], "unloaded"),
        ([], "unloaded"),
        (["FAILED"], "failed"),
        (["INCOMPATIBLE", "LOST"], "failed"),
        (["FAILED", "LOADING"], "loading"),
        (["FAILED", "LOADING", "READY"], "loaded"),
    ],
)
async def test_status_is_that_of_the_worker_nearest_to_serving(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, states: list[str], value: str
) -> None:
    pool = FakePool() if "READY" in states else FakePool(readiness=not_ready("why"))
    members = [WorkerStatus(name, ConnectionState[name], "", READY_STATUS) for name in states]
    monkeypatch.setattr(pool, "statuses", lambda: members)
    async with http_client(pool, tokenizer) as http:
        one = (await http.get(f"/v1/models/{MODEL}")).json()
    assert one["status"] == {"value": value, "reason": None if "READY" in states else "why"}


async def test_status_tells_a_tokenizer_that_loads_from_one_that_failed() -> None:
    loading: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    config, metrics = FrontendConfig(access_log="off", allowed_hosts="*"), PrometheusMetrics()
    table = ModelTable([ServedModel.of((MODEL,), config, FakePool(), loading, metrics.models[""])])  # type: ignore[arg-type]
    transport = httpx.ASGITransport(create_app(config, table, metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://sluice") as http:
        before = (await http.get(f"/v1/models/{MODEL}")).json()["status"]
        loading.set_exception(OSError("no such file"))
        after = (await http.get(f"/v1/models/{MODEL}")).json()["status"]
    assert before == {"value": "loading", "reason": "loading the tokenizer"}
    assert after == {"value": "failed", "reason": "the tokenizer did not load"}
