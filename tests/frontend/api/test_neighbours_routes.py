"""Small routes and fields for clients of vLLM, SageMaker and Text Embeddings Inference; content types of bodies."""

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.text.tokenizer import Tokenizer
from shared.checkpoint import Task
from tests.fakes import MODEL, FakePool, pooling
from tests.fakes import tokenizer as small_tokenizer
from tests.frontend.serving import completing, http_client

TEXT = {"model": MODEL, "prompt": "abc", "max_tokens": 8}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@pytest.fixture
def for_task(tmp_path: Path) -> Iterator[Callable[[Task], Tokenizer]]:
    def make(task: Task) -> Tokenizer:
        tokenizer = small_tokenizer(tmp_path)
        tokenizer.task = task
        return tokenizer

    yield make


@pytest.mark.parametrize(("body", "route"), [(TEXT, "/v1/completions"), (CHAT, "/v1/chat/completions")])
async def test_invocations_answer_as_the_route_of_the_body(
    tokenizer: Tokenizer, body: dict[str, Any], route: str
) -> None:
    async with http_client(completing(tokenizer), tokenizer) as http:
        for more in ({}, {"stream": True}):
            led = await http.post("/invocations", json=body | more)
            direct = await http.post(route, json=body | more)
            assert led.headers["content-type"] == direct.headers["content-type"] and led.status_code == 200
            assert ("[DONE]" in led.text) == bool(more)
        asked = led.text.count("data: ")
        assert asked == direct.text.count("data: ")
        wrong = await http.post("/invocations", json=body | {"foo": 1})
        neither = await http.post("/invocations", json={"model": MODEL})
        broken = await http.post("/invocations", content=b"{")
    assert wrong.status_code == (422 if body is TEXT else 200)
    assert (neither.status_code, broken.status_code) == (400, 400)
    assert "`messages`" in neither.json()["error"]["message"]


OF_TEI: dict[str, dict[str, Any]] = {
    "/embed": {"inputs": ["ab", "c"], "normalize": False},
    "/similarity": {"inputs": {"source_sentence": "ab", "sentences": ["cd", "e"]}, "parameters": {"truncate": True}},
    "/rerank": {"query": "ab", "texts": ["c"]},
}


async def test_invocations_lead_to_vectors_and_scores(for_task: Callable[[Task], Tokenizer]) -> None:
    pool = FakePool(play=pooling(lambda ids: [float(len(ids)), 1.0]))
    async with http_client(pool, for_task(Task("embed"))) as http:
        vectors = await http.post("/invocations", json={"input": "ab"})
        scores = await http.post("/invocations", json={"text_1": "ab", "text_2": "c"})
        ranked = await http.post("/invocations", json={"query": "ab", "texts": ["c"]})
        direct = [await http.post(path, json=body) for path, body in OF_TEI.items()]
        root = [await http.post("/", json=body) for body in OF_TEI.values()]
        same = (await http.post("/similarity", json=OF_TEI["/similarity"])).json()
        unnamed = await http.post("/", json={"inputs": "ab", "model": "none"})
        short = await http.post("/", json={"inputs": {"source_sentence": "a", "sentences": []}})
    assert [one.json() for one in root] == [one.json() for one in direct]
    assert same == pytest.approx([1.0, 7 / math.sqrt(50)])
    assert (unnamed.status_code, short.status_code, short.json()["error_type"]) == (422, 422, "Validation")
    async with http_client(pool, for_task(Task("score", labels=2))) as http:
        labels = [await http.post(path, json={"inputs": "ab"}) for path in ("/", "/predict")]
        led, direct = [(await http.post(path, json={"input": "ab"})).json() for path in ("/invocations", "/classify")]
    assert labels[0].json() == labels[1].json() and "label" in labels[0].json()[0]
    assert led["data"] == direct["data"] and "probs" in led["data"][0]
    assert "embedding" in vectors.json()["data"][0] and "score" in scores.json()["data"][0]
    assert [one["index"] for one in ranked.json()] == [0]


async def test_client_that_leaves_an_invocation_ends_it(tokenizer: Tokenizer) -> None:
    pool = FakePool()
    async with http_client(pool, tokenizer) as http:
        asking = asyncio.create_task(http.post("/invocations", json=TEXT))
        while not pool.submitted:
            await asyncio.sleep(0.01)
        assert (await http.get("/load")).json() == {"server_load": 1}
        asking.cancel()
        while pool.live:
            await asyncio.sleep(0.01)
        assert (await http.get("/load")).json() == {"server_load": 0}
    assert len(pool.aborted) == 1


async def test_ping_answers_to_both_methods_without_a_key(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    keys.chmod(0o600)
    async with http_client(FakePool(), tokenizer, api_keys=str(keys)) as http:
        answers = [await http.get("/ping"), await http.post("/ping")]
        closed = [await http.get("/load"), await http.post("/invocations", json=TEXT)]
    assert [one.status_code for one in answers] == [200, 200] and answers[0].json() == answers[1].json()
    assert [one.status_code for one in closed] == [401, 401]


async def test_tokenize_shows_the_text_of_each_token(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        plain = (await http.post("/tokenize", json={"prompt": "the €"})).json()
        shown = (await http.post("/tokenize", json={"prompt": "the €", "return_token_strs": True})).json()
        llama = (await http.post("/tokenize", json={"content": "the", "return_token_strs": True})).json()
    assert "token_strs" not in plain and shown["tokens"] == plain["tokens"]
    assert shown["token_strs"] == [tokenizer.token_text(id) for id in plain["tokens"]]
    assert "".join(llama["token_strs"]) == "the"


def logit(ranked: dict[str, float]) -> float:
    return math.log(ranked["score"] / (1 - ranked["score"]))


async def test_texts_are_ranked_as_text_embeddings_inference_does(for_task: Callable[[Task], Tokenizer]) -> None:
    pool = FakePool(play=pooling(lambda ids: [len(ids) - 5.0]))
    async with http_client(pool, for_task(Task("score", labels=1))) as http:
        body = {"query": "ab", "texts": ["c", "defgh"], "raw_scores": False}
        bare = (await http.post("/rerank", json=body)).json()
        told = (await http.post("/rerank", json=body | {"return_text": True, "top_n": 1})).json()
        ours = (await http.post("/rerank", json={"query": "ab", "documents": ["c", "defgh"]})).json()
        both = await http.post("/rerank", json=body | {"documents": ["c"]})
        none = await http.post("/rerank", json={"query": "ab"})
        raw = await http.post("/rerank", json=body | {"raw_scores": True})
    assert bare == [{"index": one["index"], "score": one["relevance_score"]} for one in ours["results"]]
    assert told == [bare[0] | {"text": "defgh"}]
    assert ours["meta"]["billed_units"] == {"input_tokens": ours["usage"]["prompt_tokens"]}
    assert [one.status_code for one in (both, none, raw)] == [400, 400, 200]
    assert none.json()["error"]["param"] == "documents"
    assert [(one["index"], one["score"]) for one in raw.json()] == [
        (1, pytest.approx(logit(bare[0]))),
        (0, pytest.approx(logit(bare[1]))),
    ]


@pytest.mark.parametrize(
    ("kind", "taken"),
    [
        (None, True), ("application/json; charset=utf-8", True), ("Application/JSON", True),
        ("application/x-www-form-urlencoded", True), ("text/plain;charset=UTF-8", True),
        ("application/vnd.api+json", True), ("multipart/form-data; boundary=x", False), ("application/xml", False),
        ("application/jsonl", False), ("image/png", False),
    ],
)  # fmt: skip
async def test_body_of_another_type_is_refused(tokenizer: Tokenizer, kind: str | None, taken: bool) -> None:
    pool = completing(tokenizer)
    headers = {"Content-Type": kind} if kind else {}
    async with http_client(pool, tokenizer) as http:
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT), ("/v1/messages", CHAT)):
            answer = await http.post(path, content=json.dumps(body), headers=headers)
            assert answer.status_code == (200 if taken else 415), (path, answer.text)
            assert taken or "Content-Type" in answer.json()["error"]["message"]
    assert bool(pool.submitted) == taken


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", TEXT),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 8}),
    ],
)
async def test_options_of_a_stream_are_refused_where_there_is_none(
    tokenizer: Tokenizer, route: str, body: dict[str, Any]
) -> None:
    async with http_client(completing(tokenizer), tokenizer) as http:
        refused = await http.post(route, json=body | {"stream_options": {}})
        taken = await http.post(route, json=body | {"stream_options": {}, "stream": True})
    assert refused.status_code == (422 if body is TEXT else 400) and taken.status_code == 200
    assert refused.json()["error"]["param"] == "stream_options"
