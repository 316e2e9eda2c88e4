"""Two models behind one app have their own tokenizers, templates, limits, workers and metrics."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from frontend.app import create_app
from frontend.model_table import ModelTable, ServedModel
from frontend.observability.metrics import PrometheusMetrics
from frontend.text.tokenizer import Tokenizer
from frontend.workers.status import DRAINING, READY, not_ready
from shared import messages as m
from shared.checkpoint import Task
from shared.config.frontend import FrontendConfig
from tests.fakes import LIMITS, READY_STATUS, FakePool, pooling, sending
from tests.fakes import tokenizer as small_tokenizer
from tests.frontend.text.tokenizers import byte_fallback, save

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ASKED = [{"role": "user", "content": "the low"}]
NAMES = {"bytes": ("bytes", "org/bytes"), "words": ("words",)}


@dataclass(frozen=True)
class Two:
    """An app with the models `bytes`, whose answers are "hello", and `words`, whose answers are "the low"."""

    http: httpx.AsyncClient
    table: ModelTable
    pools: dict[str, FakePool]
    tokenizers: dict[str, Tokenizer]

    async def post(self, path: str, **body: Any) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = save(byte_fallback(), tmp_path_factory.mktemp("words"), tokenizer_config={"chat_template": TEMPLATE})
    return {"bytes": small_tokenizer(tmp_path_factory.mktemp("bytes")), "words": Tokenizer.load(folder)}


def pool_of(name: str, tokenizer: Tokenizer, text: str, longest: int) -> FakePool:
    limits = m.Limits(longest, tokenizer.vocab_size, LIMITS.eos_token_ids, max_sequences=4)
    welcome = m.Welcome(1, 1, 4711, name, "", limits, fingerprint=f"fp_{name}")
    status = msgspec.structs.replace(READY_STATUS, model=name, max_seq_len=longest)
    return FakePool(sending(tokenizer.encode_now([text], False)[0]), status=status, welcome=welcome)


@asynccontextmanager
async def two(tokenizers: dict[str, Tokenizer], **settings: Any) -> AsyncIterator[Two]:
    config = FrontendConfig(access_log="off", allowed_hosts="*", **settings)
    metrics = PrometheusMetrics(names=list(NAMES))
    pools = {
        "bytes": pool_of("bytes", tokenizers["bytes"], "hello", 512),
        "words": pool_of("words", tokenizers["words"], "the low", 128),
    }
    table = ModelTable([
        ServedModel.of(names, config, pools[name], loaded(tokenizers[name]), metrics.models[name])  # type: ignore[arg-type]
        for name, names in NAMES.items()
    ])  # fmt: skip
    transport = httpx.ASGITransport(create_app(config, table, metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://sluice") as http:
        yield Two(http, table, pools, tokenizers)


def loaded(tokenizer: Tokenizer) -> asyncio.Future[Tokenizer]:
    future: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
    future.set_result(tokenizer)
    return future


@pytest.mark.parametrize(
    ("asked", "name", "text"),
    [
        ("bytes", "bytes", "hello"),
        ("org/bytes", "bytes", "hello"),
        ("words", "words", "the low"),
        (None, "bytes", "hello"),
    ],
)
async def test_each_request_is_answered_by_the_model_that_it_names(
    tokenizers: dict[str, Tokenizer], asked: str | None, name: str, text: str
) -> None:
    async with two(tokenizers) as it:
        chat = await it.http.post("/v1/chat/completions", json={"model": asked, "messages": ASKED, "max_tokens": 9})
        streamed = await it.http.post(
            "/v1/completions", json={"model": asked, "prompt": "the", "max_tokens": 9, "stream": True}
        )
    body, tokenizer = chat.json(), tokenizers[name]
    assert (body["model"], body["choices"][0]["message"]["content"]) == (name, text)
    assert body["system_fingerprint"] == chat.headers["X-Sluice-Fingerprint"] == fingerprint(it.table, name)
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    prompts = [submitted.prompt for submitted in it.pools[name].submitted]
    rendered = {"bytes": "<user>the low\n<assistant>", "words": "[user]the low"}[name]
    assert prompts == [tokenizer.encode_now([rendered], False)[0], tokenizer.encode_now(["the"], True)[0]]
    assert [pool.calls for other, pool in it.pools.items() if other != name] == [0]


def fingerprint(table: ModelTable, name: str) -> str:
    model = table.get(name)
    assert model is not None
    return model.fingerprint_with(f"fp_{name}")


async def test_every_format_finds_the_second_model(tokenizers: dict[str, Tokenizer]) -> None:
    async with two(tokenizers) as it:
        response = await it.post("/v1/responses", model="words", input="the")
        message = await it.post("/v1/messages", model="words", messages=ASKED, max_tokens=9)
        chat = await it.post("/api/chat", model="words:latest", messages=ASKED, stream=False)
        completion = await it.post("/completion", model="words", prompt="the")
        counted = await it.post("/v1/messages/count_tokens", model="words", messages=ASKED)
        rendered = await it.post("/apply-template", model="words", messages=ASKED)
    assert response["output"][0]["content"][0]["text"] == message["content"][0]["text"] == "the low"
    assert chat["message"]["content"] == completion["content"] == "the low"
    assert counted["input_tokens"] == len(it.pools["words"].submitted[1].prompt)
    assert rendered == {"prompt": "[user]the low"}
    assert it.pools["bytes"].calls == 0


async def test_tokenization_and_lengths_are_those_of_the_named_model(tokenizers: dict[str, Tokenizer]) -> None:
    async with two(tokenizers) as it:
        for name, tokenizer in tokenizers.items():
            tokens = await it.post("/tokenize", model=name, prompt="the low")
            assert tokens["tokens"] == tokenizer.encode_now(["the low"], True)[0]
            assert tokens["max_model_len"] == {"bytes": 512, "words": 128}[name]
            text = await it.post("/detokenize", model=name, tokens=tokens["tokens"][1:])
            assert text["prompt"] == "the low"
        long = {"prompt": "the " * 150, "max_tokens": 1}
        answers = [await it.http.post("/v1/completions", json={"model": name, **long}) for name in NAMES]
    assert [answer.status_code for answer in answers] == [200, 422]


async def test_vectors_are_those_of_the_named_model(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers["words"], "task", Task("embed"))
    async with two(tokenizers) as it:
        it.pools["words"].play = pooling(lambda ids: [1.0, 0.0])
        found = await it.post("/v1/embeddings", model="words", input="the")
        refused = await it.http.post("/v1/embeddings", json={"model": "bytes", "input": "the"})
    assert (found["model"], found["data"][0]["embedding"]) == ("words", [1.0, 0.0])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "task_not_served")


async def test_receipt_is_checked_by_the_model_that_made_it(tokenizers: dict[str, Tokenizer]) -> None:
    sent = {"model": "words", "prompt": "the", "max_tokens": 9, "receipt": True}
    async with two(tokenizers) as it:
        receipt = (await it.post("/v1/completions", **sent))["choices"][0]["receipt"]
        verdict = await it.post("/v1/receipts/verify", receipt=receipt, request=sent)
    assert verdict["fingerprint_matches"] and verdict["identical"], verdict
    assert verdict["fingerprint"] == fingerprint(it.table, "words") and it.pools["bytes"].calls == 0


async def test_lists_have_both_models(tokenizers: dict[str, Tokenizer]) -> None:
    async with two(tokenizers) as it:
        models = (await it.http.get("/v1/models")).json()
        one = (await it.http.get("/v1/models/words")).json()
        tags, running = [(await it.http.get(path)).json()["models"] for path in ("/api/tags", "/api/ps")]
        shown = await it.post("/api/show", name="words")
        stats = (await it.http.get("/stats")).json()
    rows = [(row["id"], row["max_model_len"], row["fingerprint"]) for row in models["data"]]
    prints = {name: fingerprint(it.table, name) for name in NAMES}
    assert rows == [
        ("bytes", 512, prints["bytes"]),
        ("org/bytes", 512, prints["bytes"]),
        ("words", 128, prints["words"]),
    ]
    assert (models["first_id"], models["last_id"], one) == ("bytes", "words", models["data"][2])
    assert [row["name"] for row in tags] == [row["name"] for row in running] == ["bytes:latest", "words:latest"]
    assert shown["template"] == TEMPLATE and shown["model_info"]["sluice.context_length"] == 128
    assert [(row["model"], row["fingerprint"]) for row in stats["workers"]] == list(prints.items())
    assert (stats["running"], stats["fingerprint"]) == (4, "")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": ASKED}),
        ("/v1/messages", {"messages": ASKED, "max_tokens": 2}),
        ("/api/chat", {"messages": ASKED}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
async def test_name_of_no_model_is_refused_and_one_of_any_goes_to_the_first(
    tokenizers: dict[str, Tokenizer], path: str, body: dict[str, Any]
) -> None:
    async with two(tokenizers) as it:
        refused = await it.http.post(path, json={"model": "other", **body})
        listed = await it.http.get("/v1/models/other")
    async with two(tokenizers, any_model_name=True) as any_name:
        taken = await any_name.http.post(path, json={"model": "other", **body})
    assert refused.status_code == (422 if path == "/v1/completions" else 404) and "other" in refused.text
    assert (listed.status_code, listed.json()["error"]["code"]) == (404, "model_not_found")
    assert taken.status_code == 200 and not any(pool.calls for pool in it.pools.values())
    assert any_name.pools["words"].calls == 0


async def test_series_have_the_label_of_their_model(tokenizers: dict[str, Tokenizer]) -> None:
    async with two(tokenizers) as it:
        for name in ("words", "words", "bytes"):
            await it.post("/v1/completions", model=name, prompt="the", max_tokens=9)
        it.pools["words"].counters.gaps = 3
        page = (await it.http.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]

    def values(name: str, **labels: str) -> dict[str, float]:
        chosen = [sample for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
        return {sample.labels["model_name"]: sample.value for sample in chosen}

    assert values("sluice_request_success_total", finished_reason="eos") == {"bytes": 1, "words": 2}
    assert values("sluice_time_to_first_token_seconds_count") == {"bytes": 1, "words": 2}
    assert values("sluice_bus_gaps_total") == {"bytes": 0, "words": 3}
    assert values("sluice_workers_ready") == {"bytes": 1, "words": 1}
    assert values("sluice_frontend_loop_lag_seconds_count") == {"bytes": 0}
    assert {sample.labels["model_name"] for sample in samples} == set(NAMES)


async def test_readiness_asks_every_model_and_a_request_only_its_own(tokenizers: dict[str, Tokenizer]) -> None:
    async with two(tokenizers) as it:
        ready = await it.http.get("/ready")
        it.pools["words"].readiness = not_ready("loading 42%")
        waiting, health = await it.http.get("/ready"), (await it.http.get("/health")).json()
        body = {"prompt": "the", "max_tokens": 9}
        answers = [await it.http.post("/v1/completions", json={"model": name, **body}) for name in NAMES]
        it.pools["words"].readiness = READY
        await it.table.drain(0.0)
        drained = await it.http.get("/ready")
    assert (ready.status_code, waiting.status_code, drained.status_code) == (200, 503, 503)
    assert waiting.json()["reason"] == "words: loading 42%" and health["model_loaded"] is False
    assert [answer.status_code for answer in answers] == [200, 503]
    assert drained.json()["reason"] == DRAINING.text


async def test_pools_of_all_models_start_end_and_empty_their_caches(tokenizers: dict[str, Tokenizer]) -> None:
    async with two(tokenizers, api_key="sk-a") as it:
        await it.table.start()
        headers = {"Authorization": "Bearer sk-a"}
        emptied = await it.http.post("/reset_prefix_cache", headers=headers)
        await it.table.close()
    assert emptied.json()["workers"] == 2
    assert [(pool.started, pool.closed, pool.resets) for pool in it.pools.values()] == [(True, True, 1)] * 2


async def test_two_models_cannot_have_one_name(tokenizers: dict[str, Tokenizer]) -> None:
    async with two(tokenizers) as it:
        first, second = it.table
        with pytest.raises(ValueError, match="same name"):
            ModelTable([first, ServedModel(("org/bytes",), second.config, second.service, second.metrics)])
