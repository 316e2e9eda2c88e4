"""The fingerprint in answers, headers and reports, and what the frontend adds to the worker's fingerprint."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frontend.model_context import ModelContext, combined
from frontend.text.tokenizer import Tokenizer
from frontend.workers.status import not_ready
from shared import messages as m
from shared.checkpoint import Task
from shared.config.frontend import FrontendConfig
from tests.fakes import MODEL, FakePool, pooling, sending
from tests.fakes import tokenizer as small_tokenizer
from tests.frontend.serving import http_client

HEADER = "x-sluice-fingerprint"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
GENERATING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": ["hi", "ho"], "n": 2}),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", CHAT),
    ("/api/chat", {"model": MODEL, "messages": CHAT["messages"], "options": {"num_predict": 4}}),
    ("/api/generate", {"model": MODEL, "prompt": "hi"}),
]
OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


def context(tokenizer: Tokenizer, **config: Any) -> ModelContext:
    return ModelContext.of(("tiny",), tokenizer, FrontendConfig(**config))


def expected(tokenizer: Tokenizer) -> str:
    return combined("fp_worker", context(tokenizer).text_fingerprint)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), GENERATING)
async def test_every_generating_route_names_it_in_its_header_and_openai_in_the_answer(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], stream: bool
) -> None:
    async with http_client(FakePool(sending([104])), tokenizer) as http:
        answer = await http.post(path, json={**body, "stream": stream})
    assert answer.status_code == 200 and answer.headers[HEADER] == expected(tokenizer)
    if path in OPENAI:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "system_fingerprint" in line]
        events = [json.loads(line) for line in lines]
        assert events and {(event.get("response") or event)["system_fingerprint"] for event in events} == {
            expected(tokenizer)
        }
        chunks = [line for line in answer.text.splitlines() if '"choices"' in line]
        assert len(chunks) == len([line for line in chunks if "system_fingerprint" in line])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "hi"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/api/embed", {"model": MODEL, "input": "hi"}),
        ("/api/embeddings", {"model": MODEL, "prompt": "hi"}),
    ],
)
async def test_every_pooling_route_names_it_in_its_header(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    tokenizer = small_tokenizer(tmp_path)
    tokenizer.task = Task("embed")
    async with http_client(FakePool(play=pooling(lambda ids: [1.0, 2.0])), tokenizer) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200 and answer.headers[HEADER] == expected(tokenizer)


async def test_reports_have_it(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        models, stats = [(await http.get(path)).json() for path in ("/v1/models", "/stats")]
    found = [models["data"][0], stats, stats["worker"], stats["workers"][0]]
    assert [each["fingerprint"] for each in found] == [expected(tokenizer)] * 4


@pytest.mark.parametrize("loaded", [False, True])
async def test_reports_have_none_before_the_worker_and_the_tokenizer_are_there(
    tokenizer: Tokenizer, loaded: bool
) -> None:
    pool = FakePool() if not loaded else FakePool(welcome=None, readiness=not_ready("loading"))
    async with http_client(pool, tokenizer if loaded else None) as http:
        models, stats = [(await http.get(path)).json() for path in ("/v1/models", "/stats")]
    assert (models["data"][0]["fingerprint"], stats["fingerprint"]) == (None, "")


async def test_worker_without_a_fingerprint_gives_none(tokenizer: Tokenizer) -> None:
    pool = FakePool(sending([104]))
    pool.welcome = msgspec.structs.replace(
        pool.welcome or m.Welcome(1, 1, 1, "", "", m.Limits(1, 1, ())), fingerprint=""
    )
    async with http_client(pool, tokenizer) as http:
        answer = await http.post("/v1/chat/completions", json=CHAT)
    assert HEADER not in answer.headers and answer.json()["system_fingerprint"] is None


async def test_refused_request_has_none(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        answer = await http.post("/v1/chat/completions", json={**CHAT, "temperature": -1})
    assert answer.status_code == 400 and HEADER not in answer.headers


@pytest.mark.parametrize(
    "config",
    [
        {"tool_format": "llama"},
        {"reasoning_format": "think"},
        {"sampling_defaults": "model"},
        {"special_tokens_in_content": True},
    ],
)
def test_how_prompts_are_made_and_answers_are_read_is_in_it(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    tokenizer.generation = {"temperature": 0.5}
    assert context(tokenizer, **config).text_fingerprint != context(tokenizer).text_fingerprint


def test_chat_template_is_in_it_and_what_only_concerns_http_is_not(tmp_path: Path) -> None:
    one, other = small_tokenizer(tmp_path), small_tokenizer(tmp_path)
    settings = {"any_model_name": True, "max_body_bytes": 99, "completions_stream_format": "events", "keepalive_s": 1.0}
    assert context(other, **settings).text_fingerprint == context(one).text_fingerprint
    other.templates = {"default": "{{ messages }}"}
    assert context(other).text_fingerprint != context(one).text_fingerprint
