"""Requests for vectors and scores over a fake worker: prompts, refusals, windows, failures."""

import asyncio
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.api.pooling.relevance import AFTER, BEFORE
from frontend.errors import Overloaded
from frontend.generation.service import WINDOW
from frontend.text.tokenizer import Tokenizer
from shared import messages as m
from shared.checkpoint import Task
from tests.fakes import FakePool, pooling
from tests.fakes import tokenizer as small_tokenizer
from tests.frontend.serving import http_client

EMBED = Task("embed", prompts={"query": "Q:", "document": ""})
HEAD = Task("score", labels=1)


@pytest.fixture
def for_task(tmp_path: Path) -> Iterator[Callable[[Task], Tokenizer]]:
    """Yields a function that returns the tokenizer of a model with the given task."""

    def make(task: Task) -> Tokenizer:
        tokenizer = small_tokenizer(tmp_path)
        tokenizer.task = task
        return tokenizer

    yield make


def lengths(ids: list[int]) -> list[float]:
    return [float(len(ids)), 1.0]


async def test_texts_get_the_tokenizers_tokens_and_ids_are_taken_as_they_are(
    for_task: Callable[[Task], Tokenizer],
) -> None:
    pool, tokenizer = FakePool(play=pooling(lengths)), for_task(EMBED)
    async with http_client(pool, tokenizer) as http:
        told = (await http.post("/v1/embeddings", json={"input": ["ab", [1, 2, 3]]})).json()
        mixed = (await http.post("/v1/embeddings", json={"input": [[7], [8, 9]], "dimensions": 5})).json()
        prompted = (await http.post("/v1/embeddings", json={"input": "ab", "prompt_name": "query"})).json()
        bare = (await http.post("/v1/embeddings", json={"input": "ab", "add_special_tokens": False})).json()
    assert [entry["embedding"] for entry in told["data"]] == [[3.0, 1.0], [3.0, 1.0]]
    assert [one.prompt for one in pool.submitted[:2]] == [await tokenizer.encode("ab"), [1, 2, 3]]
    assert told["usage"] == {"prompt_tokens": 6, "total_tokens": 6} and told["object"] == "list"
    asked = pool.submitted[2].stream.submit
    assert asked.pooling == m.Pooling(m.PoolingKind.LAST, True, 5) and asked.sampling.max_tokens == 0
    assert (mixed["usage"]["prompt_tokens"], prompted["usage"]["prompt_tokens"]) == (3, 5)
    assert bare["usage"]["prompt_tokens"] == 2


async def test_many_prompts_are_submitted_a_window_at_a_time(for_task: Callable[[Task], Tokenizer]) -> None:
    most = 0

    def counting(pool: FakePool, stream: Any) -> None:
        nonlocal most
        most = max(most, pool.live)
        pooling(lengths)(pool, stream)

    pool, count = FakePool(play=counting), 2 * WINDOW + 3
    inputs = [[1] * (1 + index % 5) for index in range(count)]
    async with http_client(pool, for_task(EMBED)) as http:
        told = (await http.post("/v1/embeddings", json={"input": inputs})).json()
    assert [entry["embedding"][0] for entry in told["data"]] == [float(len(ids)) for ids in inputs]
    assert most == WINDOW and len(pool.submitted) == count
    assert told["usage"]["prompt_tokens"] == sum(map(len, inputs))


async def test_refusal_or_failure_of_one_prompt_is_the_answer_and_ends_the_others(
    for_task: Callable[[Task], Tokenizer],
) -> None:
    full = FakePool(play=pooling(lengths), refusals={1: Overloaded("full", code="queue_full", retry_after=3.0)})
    async with http_client(full, for_task(EMBED)) as http:
        refused = await http.post("/v1/embeddings", json={"input": [[1]] * (WINDOW + 5)})
    assert refused.status_code == 503 and refused.headers["retry-after"] == "3" and not full.live
    ending = FakePool(
        play=pooling(lengths), refusals={WINDOW + 1: Overloaded("draining", code="draining", retry_after=3.0)}
    )
    async with http_client(ending, for_task(EMBED)) as http:
        halfway = await http.post("/v1/embeddings", json={"input": [[1]] * (WINDOW + 5)})
    assert halfway.status_code == 503 and not ending.live
    broken = FakePool(play=pooling(lengths, m.Outcome.ERROR))
    async with http_client(broken, for_task(EMBED)) as http:
        failed = await http.post("/v1/embeddings", json={"input": [[1], [2]]})
    assert failed.status_code == 500 and not broken.live
    silent = FakePool(play=pooling(lambda ids: []))
    async with http_client(silent, for_task(EMBED)) as http:
        nothing = await http.post("/v1/embeddings", json={"input": [[1]]})
    assert nothing.status_code == 500 and "sent no vector" in nothing.text


@pytest.mark.parametrize("task", [EMBED, HEAD])
async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    for_task: Callable[[Task], Tokenizer], monkeypatch: pytest.MonkeyPatch, task: Task
) -> None:
    tokenizer, encoded = for_task(task), list[object]()
    monkeypatch.setattr(tokenizer, "encode_now", lambda texts, *_: encoded.append(texts) or [])
    async with http_client(FakePool(), tokenizer) as http:
        long = "x" * 1_000_000
        scored = await http.post("/v1/score", json={"text_1": "a", "text_2": ["b", long]})
        asked = await http.post("/v1/embeddings", json={"input": ["a", long]})
    assert scored.json()["error"]["code"] == "context_length_exceeded"
    assert task is HEAD or asked.json()["error"]["code"] == "context_length_exceeded"
    assert encoded == []


async def test_client_that_leaves_ends_its_prompts(for_task: Callable[[Task], Tokenizer]) -> None:
    pool = FakePool()
    async with http_client(pool, for_task(EMBED)) as http:
        asking = asyncio.create_task(http.post("/v1/embeddings", json={"input": [[1], [2]]}))
        while len(pool.submitted) < 2:
            await asyncio.sleep(0.01)
        asking.cancel()
        while pool.live:
            await asyncio.sleep(0.01)
    assert sorted(pool.aborted) == [1, 2]


async def test_classification_head_scores_a_pair_with_the_sigmoid(for_task: Callable[[Task], Tokenizer]) -> None:
    pool = FakePool(play=pooling(lambda ids: [len(ids) - 5.0]))
    async with http_client(pool, for_task(HEAD)) as http:
        told = (await http.post("/score", json={"text_1": "ab", "text_2": ["c", "defgh"]})).json()
        ranked = (await http.post("/v2/rerank", json={"query": "ab", "documents": ["c", "defgh"]})).json()
    asked = pool.submitted[0].stream.submit.pooling
    assert asked == m.Pooling(m.PoolingKind.LOGITS, token_ids=(0,))
    expected = [1 / (1 + math.exp(5.0 - len(one.prompt))) for one in pool.submitted[:2]]
    assert [entry["score"] for entry in told["data"]] == pytest.approx(expected) and expected[0] < expected[1]
    assert [(entry["index"], entry["document"]) for entry in ranked["results"]] == [
        (1, {"text": "defgh"}),
        (0, {"text": "c"}),
    ]


@pytest.mark.parametrize("first", ["text_1", "queries", "data_1"])
@pytest.mark.parametrize("second", ["text_2", "documents", "items", "data_2"])
async def test_sides_of_a_score_have_all_of_vllms_names(
    for_task: Callable[[Task], Tokenizer], first: str, second: str
) -> None:
    pool = FakePool(play=pooling(lambda ids: [len(ids) - 5.0]))
    async with http_client(pool, for_task(HEAD)) as http:
        told = await http.post("/score", json={first: "ab", second: ["c", "defgh"]})
        led = await http.post("/invocations", json={first: "ab", second: ["c", "defgh"]})
        uneven = await http.post("/score", json={first: ["a", "b"], second: ["c"]})
        lone = await http.post("/score", json={first: "ab"})
        twice = await http.post("/score", json={"text_1": "a", "queries": "a", second: "c"})
    assert told.json()["data"] == led.json()["data"] and len(told.json()["data"]) == 2
    assert f"`{first}` has 2 texts and `{second}` has 1" in uneven.json()["error"]["message"]
    assert (uneven.json()["error"]["param"], lone.json()["error"]["param"]) == (first, "text_2")
    assert (twice.json()["error"]["param"], twice.json()["error"]["code"]) == ("queries", "conflicting_fields")


async def test_scores_without_activation_are_the_logits_of_a_head(for_task: Callable[[Task], Tokenizer]) -> None:
    raw = {"use_activation": False}
    async with http_client(FakePool(play=pooling(lambda ids: [-2.0])), for_task(HEAD)) as http:
        told = (await http.post("/score", json={"queries": "a", "documents": "b", **raw})).json()
        ranked = (await http.post("/rerank", json={"query": "a", "documents": ["b"], **raw})).json()
        usual = (await http.post("/rerank", json={"query": "a", "documents": ["b"], "use_activation": True})).json()
    assert told["data"][0]["score"] == ranked["results"][0]["relevance_score"] == -2.0
    assert usual["results"][0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(2.0)))
    async with http_client(FakePool(play=pooling(lengths)), for_task(EMBED)) as http:
        cosine = await http.post("/score", json={"queries": "a", "documents": "b", **raw})
    assert cosine.status_code == 400 and cosine.json()["error"]["param"] == "use_activation"


async def test_vectors_without_activation_keep_their_lengths(for_task: Callable[[Task], Tokenizer]) -> None:
    pool = FakePool(play=pooling(lengths))
    async with http_client(pool, for_task(EMBED)) as http:
        for path in ("/v1/embeddings", "/pooling"):
            for given in (None, True, False):
                assert (await http.post(path, json={"input": "a", "use_activation": given})).status_code == 200
        both = await http.post("/v1/embeddings", json={"input": "a", "use_activation": False, "normalize": True})
    asked = [one.stream.submit.pooling for one in pool.submitted]
    assert [one is not None and one.normalized for one in asked] == [True, True, False] * 2
    assert both.json()["error"]["param"] == "use_activation"


async def test_model_that_is_asked_gets_its_question_between_constant_parts(
    for_task: Callable[[Task], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "yes_no", (121, 110))
    pool, tokenizer = FakePool(play=pooling(lambda ids: [2.0, 1.0])), for_task(Task("score"))
    pool.welcome = m.Welcome(1, 1, 4711, "tiny", "", m.Limits(4096, 269, (265,)))
    async with http_client(pool, tokenizer) as http:
        told = (await http.post("/score", json={"text_1": "q", "text_2": "d", "instruction": "I"})).json()
    (asked,) = pool.submitted
    assert tokenizer.decode(asked.prompt, skip_special=False) == (
        f"{BEFORE}<Instruct>: I\n<Query>: q\n<Document>: d{AFTER}"
    )
    assert asked.stream.submit.pooling == m.Pooling(m.PoolingKind.LOGITS, token_ids=(121, 110))
    assert told["data"][0]["score"] == pytest.approx(math.e / (1 + math.e))


async def test_cosine_of_opposite_equal_and_zero_vectors(for_task: Callable[[Task], Tokenizer]) -> None:
    vectors = {1: [1.0, 0.0], 2: [-3.0, 0.0], 3: [0.0, 0.0], 4: [1.0, 1.0]}
    pool = FakePool(play=pooling(lambda ids: vectors[len(ids) - 1]))
    async with http_client(pool, for_task(EMBED)) as http:
        told = (await http.post("/score", json={"text_1": "a", "text_2": ["a", "ab", "abc", "abcd"]})).json()
    assert [entry["score"] for entry in told["data"]] == pytest.approx([1.0, -1.0, 0.0, math.sqrt(0.5)])


@pytest.mark.parametrize(
    ("task", "path", "body", "words"),
    [
        (Task(), "/v1/embeddings", {"input": "a"}, "/v1/embeddings needs a server with --task embed"),
        (Task(), "/rerank", {"query": "a", "documents": ["b"]}, "--task embed or score"),
        (EMBED, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "--task generate"),
        (HEAD, "/v1/embeddings", {"input": "a"}, "this one serves --task score"),
    ],
)
async def test_route_of_another_task_is_refused(
    for_task: Callable[[Task], Tokenizer], task: Task, path: str, body: dict[str, Any], words: str
) -> None:
    async with http_client(FakePool(), for_task(task)) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "task_not_served"


async def test_window_is_no_larger_than_what_the_workers_hold(for_task: Callable[[Task], Tokenizer]) -> None:
    pool = FakePool(play=pooling(lengths))
    pool.welcome = m.Welcome(1, 1, 4711, "tiny", "", m.Limits(4096, 269, (265,), max_sequences=3))
    async with http_client(pool, for_task(EMBED)) as http:
        told = (await http.post("/v1/embeddings", json={"input": [[1]] * 8})).json()
    assert len(told["data"]) == 8
