"""Scores by the next token over a fake worker: prompts, probabilities and refusals."""

import math
from typing import Any

import pytest

from shared import messages as m
from shared.wire import pack_f32
from tests.fakes import FakePool
from tests.frontend.serving import http_client
from tests.frontend.speaking import Model

BODY: dict[str, Any] = {"query": "A dog", "items": [" barks", [5, 6]], "label_token_ids": [7, 9, 7]}


def answering(logprobs: dict[int, float]) -> Any:
    def play(pool: FakePool, stream: Any) -> None:
        def end() -> None:
            stream.vector = pack_f32([*(logprobs[id] for id in stream.submit.pooling.token_ids), 1.0])
            pool.end(stream, m.Outcome.POOLED)

        pool.later(end)

    return play


async def post(model: Model, body: dict[str, Any]) -> Any:
    async with http_client(model.pool, model.tokenizer) as http:
        return await http.post("/generative_scoring", json=body)


async def test_prompts_are_the_query_and_each_item(qwen: Model) -> None:
    qwen.pool.play = answering({7: -1.0, 9: -2.0})
    encode = qwen.tokenizer.encode_now
    (query,), (item,) = encode(["A dog"], True), encode([" barks"], False)
    assert (await post(qwen, BODY)).status_code == 200
    assert sorted(one.prompt for one in qwen.pool.submitted) == sorted([[*query, *item], [*query, 5, 6]])
    qwen.pool.submitted.clear()
    assert (await post(qwen, {**BODY, "item_first": True, "add_special_tokens": False})).status_code == 200
    (bare,) = encode(["A dog"], False)
    assert sorted(one.prompt for one in qwen.pool.submitted) == sorted([[*item, *bare], [5, 6, *bare]])


@pytest.mark.parametrize(
    ("softmax", "logprobs", "score"),
    [
        (True, {7: -1.0, 9: -2.0}, 1 / (1 + math.exp(-1))),
        (False, {7: -1.0, 9: -2.0}, math.exp(-1)),
        (True, {7: -1000.0, 9: -1000.0}, 0.5),
        (False, {7: -1000.0, 9: -1000.0}, 0.0),
    ],
)
async def test_score_is_the_probability_of_the_first_label(
    qwen: Model, softmax: bool, logprobs: dict[int, float], score: float
) -> None:
    qwen.pool.play = answering(logprobs)
    answer = (await post(qwen, {**BODY, "apply_softmax": softmax})).json()
    assert [(one["index"], one["object"], one["score"]) for one in answer["data"]] == [
        (index, "score", pytest.approx(score)) for index in range(2)
    ]
    assert answer["id"].startswith("generative-scoring-") and answer["object"] == "list"
    assert answer["usage"]["total_tokens"] == sum(len(one.prompt) for one in qwen.pool.submitted)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"items": []}, "items"),
        ({"items": [[]], "query": []}, "items"),
        ({"items": [[99999999]]}, "items"),
        ({"query": [-1]}, "query"),
        ({"query": None}, "query"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": [99999999]}, "label_token_ids"),
    ],
)
async def test_bad_field_is_refused_by_name(qwen: Model, change: dict[str, Any], param: str) -> None:
    answer = await post(qwen, BODY | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not qwen.pool.submitted


@pytest.mark.parametrize("side", ["query", "queries"])
async def test_scores_of_texts_refuse_sglangs_labels_by_name(qwen: Model, side: str) -> None:
    body = {side: "A dog", "items": [" barks"], "label_token_ids": [7], "apply_softmax": True, "item_first": False}
    async with http_client(qwen.pool, qwen.tokenizer) as http:
        answer = await http.post("/v1/score", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "label_token_ids", "unsupported_field")
    assert "/generative_scoring" in error["message"] and not qwen.pool.submitted
