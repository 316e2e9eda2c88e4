"""Labels, vectors of tokens, cut texts, and the formats of TEI and Cohere, over a fake worker."""

import base64
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.api.pooling.cohere import in_int8
from frontend.text.tokenizer import Tokenizer
from shared import messages as m
from shared.checkpoint import Task
from tests import encoders
from tests.fakes import FakePool, pooling
from tests.frontend.serving import http_client

EMBED = Task("embed", m.PoolingKind.MEAN, encoder=True, prompts={"query": "red "})
LABELS = Task("score", labels=3, encoder=True, label_names=("low", "middle", "high"))
ONE = Task("score", labels=1, encoder=True, label_names=("relevant",))
LOGITS = [0.5, 2.0, -1.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("wordpiece")
    encoders.word_piece().save_pretrained(found)
    return found


@pytest.fixture
def for_task(folder: Path) -> Iterator[Callable[[Task], Tokenizer]]:
    """Yields a function that returns a WordPiece tokenizer of a model with the given task."""

    def make(task: Task) -> Tokenizer:
        tokenizer = Tokenizer.load(folder)
        tokenizer.task = task
        return tokenizer

    yield make


def welcomed(most: int = 64, size: int = 2, play: Callable[[list[int]], list[float]] = lambda ids: LOGITS) -> FakePool:
    pool = FakePool(play=pooling(play))
    pool.welcome = m.Welcome(1, 1, 4711, "tiny", "", m.Limits(most, encoders.VOCAB, (), size))
    return pool


def softmax(logits: list[float]) -> list[float]:
    shares = [math.exp(one) for one in logits]
    return [share / sum(shares) for share in shares]


async def test_classify_names_the_most_probable_label(for_task: Callable[[Task], Tokenizer]) -> None:
    pool = welcomed()
    async with http_client(pool, for_task(LABELS)) as http:
        told = (await http.post("/v1/classify", json={"input": ["red mill", [5, 6]]})).json()
        raw = (await http.post("/classify", json={"input": "red", "use_activation": False})).json()
        several = (await http.post("/pooling", json={"input": "red"})).json()
        wrong = await http.post("/pooling", json={"input": "red", "task": "embed"})
        ranked = await http.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert [(one["index"], one["label"], one["num_classes"]) for one in told["data"]] == [
        (0, "middle", 3),
        (1, "middle", 3),
    ]
    assert told["data"][0]["probs"] == pytest.approx(softmax(LOGITS)) and told["usage"]["prompt_tokens"] == 6
    assert raw["data"][0]["probs"] == LOGITS
    assert several["data"][0]["data"] == pytest.approx(softmax(LOGITS))
    assert wrong.json()["error"]["param"] == "task" and "3 labels" in ranked.text and ranked.status_code == 400
    asked = pool.submitted[0].stream.submit
    assert asked.pooling == m.Pooling(m.PoolingKind.LOGITS, token_ids=(0, 1, 2)) and asked.second_from == 0


async def test_pooled_labels_are_the_same_numbers_in_base64_and_in_lists(
    for_task: Callable[[Task], Tokenizer],
) -> None:
    async with http_client(welcomed(), for_task(LABELS)) as http:
        coded = (await http.post("/pooling", json={"input": "red", "encoding_format": "base64"})).json()["data"][0]
        raw = (await http.post("/pooling", json={"input": "red", "use_activation": False})).json()["data"][0]
        other = {"dimensions": 2, "prompt_name": "x", "normalize": True}
        refused = [await http.post("/pooling", json={"input": "red", name: value}) for name, value in other.items()]
        same = await http.post("/pooling", json={"input": "red", "normalize": False, "add_special_tokens": True})
    assert struct.unpack("<3f", base64.b64decode(coded["data"])) == pytest.approx(softmax(LOGITS))
    assert raw["data"] == LOGITS and same.status_code == 200
    assert [(one.status_code, one.json()["error"]["param"]) for one in refused] == [(400, name) for name in other]


async def test_classifier_reads_a_text_without_the_tokenizers_tokens_if_asked(
    for_task: Callable[[Task], Tokenizer],
) -> None:
    pool, tokenizer = welcomed(), for_task(LABELS)
    bare = {"input": "red mill bridge light", "add_special_tokens": False}
    async with http_client(pool, tokenizer) as http:
        for path in ("/classify", "/pooling"):
            for more in ({}, {"truncate_prompt_tokens": 3}):
                answer = await http.post(path, json=bare | more)
                assert answer.status_code == 200, answer.text
    (ids,) = tokenizer.encode_now(["red mill bridge light"], False)
    assert [one.prompt for one in pool.submitted] == [ids, ids[:3]] * 2


@pytest.mark.parametrize("name", ["softmax", "activation"])
async def test_older_names_of_the_activation_are_refused(for_task: Callable[[Task], Tokenizer], name: str) -> None:
    async with http_client(welcomed(), for_task(LABELS)) as http:
        refused = await http.post("/classify", json={"input": "red", name: False})
        same = await http.post("/classify", json={"input": "red", name: True})
    assert (refused.status_code, refused.json()["error"]["param"], same.status_code) == (400, name, 200)


async def test_labels_that_may_all_be_true_have_a_sigmoid_each(for_task: Callable[[Task], Tokenizer]) -> None:
    several = Task("score", labels=3, encoder=True, multi_label=True)
    async with http_client(welcomed(), for_task(several)) as http:
        told = (await http.post("/classify", json={"input": "red"})).json()["data"][0]
    assert told["probs"] == pytest.approx([1 / (1 + math.exp(-one)) for one in LOGITS]) and told["label"] == "LABEL_1"


async def test_second_text_of_a_pair_begins_where_the_tokenizer_says(for_task: Callable[[Task], Tokenizer]) -> None:
    pool, tokenizer = welcomed(play=lambda ids: [1.5]), for_task(ONE)
    async with http_client(pool, tokenizer) as http:
        scored = (await http.post("/v1/score", json={"text_1": "red mill", "text_2": ["old stone bridge", "a"]})).json()
        raw = (await http.post("/rerank", json={"query": "red", "texts": ["mill"], "raw_scores": True})).json()
        await http.post("/v1/score", json={"text_1": "red", "text_2": "the [SEP] mill"})
    submits = [one.stream.submit for one in pool.submitted]
    assert [one.second_from for one in submits[:2]] == [4, 4]
    assert scored["data"][0]["score"] == pytest.approx(1 / (1 + math.exp(-1.5))) and raw == [{"index": 0, "score": 1.5}]
    prompt = list(struct.unpack(f"<{len(submits[3].prompt) // 4}I", submits[3].prompt))
    assert submits[3].second_from == 3 and prompt.count(3) == 2, "a spelling of [SEP] in a text is text"


async def test_texts_are_cut_as_the_request_says(for_task: Callable[[Task], Tokenizer]) -> None:
    pool, tokenizer = welcomed(8, play=lambda ids: [3.0, 4.0]), for_task(EMBED)
    words = "red house old mill stone bridge river light"
    whole = tokenizer.encode_now([words])[0]
    async with http_client(pool, tokenizer) as http:

        async def prompt(path: str, **body: Any) -> list[int]:
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return pool.submitted[-1].prompt

        right = await prompt("/v1/embeddings", input=words, truncate_prompt_tokens=-1)
        left = await prompt("/v1/embeddings", input=words, truncate_prompt_tokens=4, truncation_side="left")
        ids = await prompt("/v1/embeddings", input=[list(range(5, 20))], truncate_prompt_tokens=3)
        tei = await prompt("/embed", inputs=words, truncate=True, truncation_direction="Left")
        cohere = await prompt("/v2/embed", texts=[words])
        await prompt("/v2/embed", texts=["red house"], truncate="NONE", max_tokens=4)
        ollama = await prompt("/api/embed", model="tiny", input=words)
        assert ollama == await prompt("/api/embeddings", model="tiny", prompt=words)
        for path, body in (
            ("/v1/embeddings", {"input": words}), ("/embed", {"inputs": words}),
            ("/v2/embed", {"texts": [words], "truncate": "NONE"}),
            ("/v2/embed", {"texts": ["red", "red house old"], "truncate": "NONE", "max_tokens": 4}),
            ("/v1/embeddings", {"input": words, "truncate_prompt_tokens": 2}),
            ("/api/embed", {"model": "tiny", "input": words, "truncate": False}),
            ("/v1/embeddings", {"input": words, "truncate_prompt_tokens": 9}),
        ):  # fmt: skip
            refused = await http.post(path, json={"model": "tiny", **body})
            assert 400 <= refused.status_code < 500, (path, refused.text)
    assert right == cohere == ollama == [*whole[:7], whole[-1]] and ids == [5, 6, 7]
    assert left == [whole[0], *whole[-3:]] and tei == [whole[0], *whole[-7:]]


async def test_ollama_takes_any_number_of_texts_and_an_empty_one_loads_the_model(
    for_task: Callable[[Task], Tokenizer],
) -> None:
    pool = welcomed(8, play=lambda ids: [float(len(ids)), 0.0])
    texts = ["red house" if index % 2 else "" for index in range(2500)]
    async with http_client(pool, for_task(EMBED)) as http:
        many = await http.post("/api/embed", json={"model": "tiny", "input": texts})
        none = [(await http.post("/api/embed", json={"model": "tiny", "input": given})).json() for given in ("", [])]
        older = await http.post("/api/embeddings", json={"model": "tiny", "prompt": ""})
        too_many = await http.post("/api/embed", json={"model": "tiny", "input": ["a"] * 17_000})
    assert many.json()["embeddings"] == [[4.0, 0.0] if text else [2.0, 0.0] for text in texts]
    assert many.json()["prompt_eval_count"] == 3 * 2500
    assert [(one["embeddings"], one["prompt_eval_count"]) for one in none] == [([], 0)] * 2
    assert older.json() == {"embedding": []} and len(pool.submitted) == 2500
    assert too_many.status_code == 400 and "`input`" in too_many.json()["error"]


BODY = {"text_1": "red house old mill stone", "text_2": "light", "truncate_prompt_tokens": -1}


async def test_second_text_of_a_pair_is_cut_and_a_first_one_that_fills_the_context_is_refused(
    for_task: Callable[[Task], Tokenizer],
) -> None:
    pool = welcomed(6, play=lambda ids: [1.0])
    async with http_client(pool, for_task(ONE)) as http:
        refused = await http.post("/v1/score", json=BODY)
        cut = await http.post(
            "/v1/score", json={"text_1": "red", "text_2": "old mill stone", "truncate_prompt_tokens": -1}
        )
        left = [
            await http.post(path, json=body)
            for path, body in (
                ("/v1/score", {"text_1": "red", "text_2": "old mill stone", "truncate_prompt_tokens": -1,
                               "truncation_side": "left"}),
                ("/rerank", {"query": "red", "texts": ["old mill stone"], "truncate": True,
                             "truncation_direction": "Left"}),
                ("/predict", {"inputs": ["red", "old mill stone"], "truncate": True, "truncation_direction": "left"}),
            )
        ]  # fmt: skip
        full = await http.post("/v1/score", json={**BODY, "truncation_side": "left"})
    assert {one.json()["error"]["code"] for one in (refused, full)} == {"context_length_exceeded"}
    prompts = [one.prompt for one in pool.submitted]
    query, document = for_task(ONE).encode_now(["red", "old mill stone"], False)
    assert cut.status_code == 200 and prompts[0] == [2, *query, 3, *document[:2], 3]
    assert [one.status_code for one in left] == [200] * 3
    assert prompts[1:] == [[2, *query, 3, *document[1:], 3]] * 3 and pool.submitted[1].stream.submit.second_from == 3


async def test_tokens_have_vectors_of_their_own(for_task: Callable[[Task], Tokenizer]) -> None:
    pool = welcomed(play=lambda ids: [float(2 * i + j) for i in range(len(ids)) for j in range(2)])
    async with http_client(pool, for_task(EMBED)) as http:
        told = (
            await http.post("/pooling", json={"input": "red mill", "task": "token_embed", "normalize": False})
        ).json()
        packed = (
            await http.post("/pooling", json={"input": "red", "task": "token_embed", "encoding_format": "base64"})
        ).json()
        plain = (await http.post("/pooling", json={"input": "red"})).json()
    assert told["data"][0]["data"] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert pool.submitted[0].stream.submit.pooling == m.Pooling(m.PoolingKind.TOKENS, False)
    assert struct.unpack("<6f", base64.b64decode(packed["data"][0]["data"])) == (0, 1, 2, 3, 4, 5)
    assert len(plain["data"][0]["data"]) == 6


async def test_formats_of_tei_and_cohere(for_task: Callable[[Task], Tokenizer]) -> None:
    pool = welcomed(play=lambda ids: [0.5, -0.25])
    async with http_client(pool, for_task(EMBED)) as http:
        assert (await http.post("/embed", json={"inputs": ["a", "b"]})).json() == [[0.5, -0.25]] * 2
        assert (await http.post("/embed", json={"inputs": ""})).json()["error_type"] == "Validation"
        body = {
            "texts": ["mill"],
            "input_type": "search_query",
            "embedding_types": ["float", "int8", "uint8", "ubinary", "binary", "base64"],
        }
        told = (await http.post("/v2/embed", json=body)).json()
        assert (await http.post("/predict", json={"inputs": "a"})).status_code in (400, 422)
    assert told["embeddings"] == {
        "float": [[0.5, -0.25]], "int8": [[127, -64]], "uint8": [[255, 64]], "ubinary": [[128]], "binary": [[0]],
        "base64": [base64.b64encode(struct.pack("<2f", 0.5, -0.25)).decode()],
    }  # fmt: skip
    assert told["texts"] == ["mill"] and told["meta"]["billed_units"] == {"input_tokens": 4}, "the prompt is counted"
    pool = welcomed()
    async with http_client(pool, for_task(LABELS)) as http:
        one = (await http.post("/predict", json={"inputs": "a"})).json()
        pair = (await http.post("/predict", json={"inputs": ["a", "b"], "raw_scores": True})).json()
        many = (await http.post("/predict", json={"inputs": [["a"], ["a", "b"]]})).json()
        odd = await http.post("/predict", json={"inputs": ["a", ["b"]]})
    assert [row["label"] for row in one] == ["middle", "low", "high"]
    assert [row["score"] for row in pair] == [2.0, 0.5, -1.0] and [len(rows) for rows in many] == [3, 3]
    assert [one.stream.submit.second_from for one in pool.submitted] == [0, 3, 0, 3] and odd.status_code == 422


def test_int8_keeps_the_cosine_of_two_vectors() -> None:
    one, other = [[math.sin(seed + 1.7 * place) / 20 for place in range(384)] for seed in (1, 2)]

    def cosine(a: list[Any], b: list[Any]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)

    assert cosine(in_int8(one), in_int8(other)) == pytest.approx(cosine(one, other), abs=1e-3)
    assert max(map(abs, in_int8(one))) == 127 and in_int8([0.0, 0.0]) == [0, 0]


async def test_older_clients_of_cohere_get_bare_vectors(for_task: Callable[[Task], Tokenizer]) -> None:
    async with http_client(welcomed(play=lambda ids: [0.5, -0.25]), for_task(EMBED)) as http:
        bare = (await http.post("/v1/embed", json={"texts": ["red", "mill"]})).json()
        forms = (await http.post("/v1/embed", json={"texts": ["red"], "embedding_types": ["int8"]})).json()
        refused = await http.post("/v1/embed", json={"texts": []})
    assert bare["embeddings"] == [[0.5, -0.25]] * 2 and bare["response_type"] == "embeddings_floats"
    assert bare["texts"] == ["red", "mill"] and bare["meta"] == {
        "billed_units": {"input_tokens": 6}, "api_version": {"version": "1"},
    }  # fmt: skip
    assert forms["embeddings"] == {"int8": [[127, -64]]} and forms["response_type"] == "embeddings_by_type"
    assert refused.status_code == 400 and "`texts`" in refused.json()["message"]


async def test_inputs_of_cohere_are_texts(for_task: Callable[[Task], Tokenizer]) -> None:
    pool, tokenizer = welcomed(play=lambda ids: [0.5, -0.25]), for_task(EMBED)
    red, mill = ({"type": "text", "text": word} for word in ("red", "mill"))
    async with http_client(pool, tokenizer) as http:
        told = (await http.post("/v2/embed", json={"inputs": [{"content": [red, mill]}, {"content": [mill]}]})).json()
        for body, field in (
            ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, "type"),
            ({"inputs": [{"content": [red]}], "texts": ["red"]}, "inputs"), ({}, "texts"), ({"inputs": []}, "inputs"),
            ({"inputs": [{"content": []}]}, "content"), ({"texts": ["red"], "images": ["data:"]}, "images"),
        ):  # fmt: skip
            refused = await http.post("/v2/embed", json=body)
            assert 400 <= refused.status_code < 500 and field in refused.json()["message"], refused.text
    assert told["texts"] == ["red\nmill", "mill"]
    assert [one.prompt for one in pool.submitted] == tokenizer.encode_now(["red mill", "mill"])


@pytest.mark.parametrize("task", [ONE, Task("embed", m.PoolingKind.MEAN, encoder=True, lower=True)])
async def test_documents_are_cut_to_the_tokens_that_a_request_allows(
    for_task: Callable[[Task], Tokenizer], task: Task
) -> None:
    pool, tokenizer = welcomed(8, play=lambda ids: [float(len(ids))]), for_task(task)
    long = "red  house old mill stone bridge river light"
    body = {"query": "red", "documents": [long, "mill"]}
    async with http_client(pool, tokenizer) as http:
        refused = await http.post("/v1/rerank", json=body)
        told = await http.post("/v2/rerank", json={**body, "max_tokens_per_doc": 3})
        odd = await http.post("/v2/rerank", json={**body, "max_tokens_per_doc": -1})
        seen = len(pool.submitted)
        fits = [
            await http.post("/v1/rerank", json={**body, "max_tokens_per_doc": 4096}),
            await http.post("/v2/rerank", json={**body, "max_tokens_per_doc": None}),
            await http.post("/v2/rerank", json={**body, "max_tokens_per_doc": 0}),
        ]
        tei = await http.post("/v2/rerank", json={"query": "red", "texts": [long]})
        asked = await http.post("/v2/rerank", json={**body, "query": long, "max_tokens_per_doc": 3})
    assert [one.status_code for one in (*fits, tei)] == [200, 200, 200, 400] and {
        len(one.prompt) for one in pool.submitted[seen:]
    } <= {3, 5, 8}
    assert asked.json()["error"]["param"] == "query" and asked.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["code"] == "context_length_exceeded" and "max_tokens_per_doc" in odd.text
    prompts = [one.prompt for one in pool.submitted[:seen]]
    cut, short = tokenizer.encode_now(["red house old", "mill"], False)
    documents = prompts[1:] if task.name == "embed" else [[2, *one[3:]] for one in prompts]
    assert documents == [[2, *cut, 3], [2, *short, 3]]
    assert {one["document"]["text"] for one in told.json()["results"]} == {long, "mill"}


async def test_texts_are_lowered_where_the_checkpoint_says(for_task: Callable[[Task], Tokenizer]) -> None:
    pool = welcomed(play=lambda ids: [1.0, 0.0])
    tokenizer = for_task(Task("embed", encoder=True, lower=True))
    encoded: list[Any] = []
    plain = tokenizer.encode_now
    tokenizer.encode_now = lambda texts, special=True: encoded.extend(texts) or plain(texts, special)  # type: ignore
    async with http_client(pool, tokenizer) as http:
        await http.post("/v1/embeddings", json={"input": "Red MILL"})
    assert encoded == ["red mill"]


@pytest.mark.parametrize("task", [ONE, Task("embed", m.PoolingKind.MEAN, encoder=True, lower=True)])
async def test_both_sides_of_a_score_are_cut_to_the_tokens_that_a_request_allows(
    for_task: Callable[[Task], Tokenizer], task: Task
) -> None:
    pool, tokenizer = welcomed(64, play=lambda ids: [float(len(ids))]), for_task(task)
    query, document = "red house old mill", "stone bridge river light"
    cut = {"max_tokens_per_query": 3, "max_tokens_per_doc": 2}
    async with http_client(pool, tokenizer) as http:
        for texts in ({"text_1": query, "text_2": document}, {"queries": [query], "documents": [document]}):
            await http.post("/v1/score", json={**texts, **cut})
        ranked = (await http.post("/rerank", json={"query": query, "documents": [document], **cut})).json()
        seen = len(pool.submitted)
        await http.post("/v1/score", json={"text_1": query, "text_2": document, **dict.fromkeys(cut, 0)})
    first, second, *whole = tokenizer.encode_now(["red house old", "stone bridge", query, document], False)
    embeds = task.name == "embed"
    prompts = [[2, *first, 3], [2, *second, 3]] if embeds else [[2, *first, 3, *second, 3]]
    assert [one.prompt for one in pool.submitted[:seen]] == prompts * 3
    assert sum(len(one.prompt) for one in pool.submitted[seen:]) == sum(map(len, whole)) + (4 if embeds else 3)
    assert ranked["results"][0]["document"] == {"text": document}
