"""Vectors and scores over HTTP equal those of transformers, pooled as the modules of sentence-transformers state."""

import itertools
import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from deploy.offline.llm import LLM
from frontend.api.pooling.relevance import AFTER, BEFORE, INSTRUCTION
from frontend.errors import SluiceError
from tests import embedders
from tests.checkpoints import TEXT
from tests.e2e.server import Server, serving
from tests.embedders import class_logits, hidden_states, next_logits, pooled, tokens

TEXTS = ["x", "the old stone bridge", *TEXT, " ".join(TEXT[:2] * 3)]
FLAGS = ("--dtype", "float32", "--prefill-chunk-size", "48")
WRITERS: dict[str, Callable[[Path], Path]] = {
    "lasttoken": lambda folder: embedders.embedder(folder, "qwen3-tied", "lasttoken"),
    "mean": lambda folder: embedders.embedder(folder, "llama", "mean"),
    "cls": lambda folder: embedders.embedder(folder, "gemma3", "cls", normalized=False, default="query"),
    "reranker": embedders.reranker,
    "classifier": embedders.classifier,
}
TASK = {"reranker": ("--task", "score")}  # the reranker's files do not state its task


@dataclass(frozen=True)
class Served:
    name: str
    folder: Path
    server: Server

    def vector(self, text: str, dimensions: int = 0) -> torch.Tensor:
        before = embedders.PROMPTS["query"] if self.name == "cls" else ""
        states = hidden_states(self.folder, tokens(self.folder, before + text))
        return pooled(states, self.name, dimensions=dimensions, normalized=self.name != "cls")


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    name, root = request.param, tmp_path_factory.mktemp("pooling")
    folder = WRITERS[name](root / "model")
    with serving(folder, root / "log", *FLAGS, *TASK.get(name, ()), held=True) as server:
        yield Served(name, folder, server)


def among(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("served", names, indirect=True, scope="module")


def differ(one: Any, other: torch.Tensor) -> float:
    """Returns the difference of two vectors: 1 - cosine or their distance, whichever is larger."""
    vector = torch.tensor(one, dtype=torch.float64)
    cosine = torch.nn.functional.cosine_similarity(vector, other.double(), dim=0).item()
    return max(1 - cosine, (vector - other).norm().item() / 1e2)


@among("lasttoken", "mean", "cls")
def test_sdk_gets_the_vectors_of_transformers_in_base64_and_in_numbers(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0) as sdk:
        in_base64 = sdk.embeddings.create(model="m", input=TEXTS)  # the SDK asks for base64
        in_numbers = sdk.embeddings.create(model="m", input=TEXTS, encoding_format="float")
        single = sdk.embeddings.create(model="m", input=TEXTS[1])
    assert [entry.index for entry in in_base64.data] == list(range(len(TEXTS)))
    for text, entry, again in zip(TEXTS, in_base64.data, in_numbers.data, strict=True):
        assert entry.embedding == again.embedding
        assert differ(entry.embedding, served.vector(text)) < 1e-6
    assert single.data[0].embedding == in_base64.data[1].embedding
    counts = [len(tokens(served.folder, text)) for text in TEXTS]
    added = len(tokens(served.folder, embedders.PROMPTS["query"] + "x")) - counts[0] if served.name == "cls" else 0
    assert abs(in_base64.usage.prompt_tokens - sum(counts) - added * len(TEXTS)) <= len(TEXTS) * bool(added)
    assert in_base64.usage.total_tokens == in_base64.usage.prompt_tokens == in_numbers.usage.prompt_tokens


@among("lasttoken", "mean")
def test_vector_has_the_same_bits_in_any_company_and_from_ids_and_from_the_cache(served: Served) -> None:
    def ask(**body: Any) -> list[str]:
        answer = served.server.client.post("/v1/embeddings", json={"encoding_format": "base64", **body})
        assert answer.status_code == 200, answer.text
        return [entry["embedding"] for entry in answer.json()["data"]]

    alone = [ask(input=text, cache_salt=f"alone {index}")[0] for index, text in enumerate(TEXTS)]
    assert ask(input=TEXTS) == alone
    assert ask(input=[tokens(served.folder, text) for text in TEXTS]) == alone
    assert ask(input=tokens(served.folder, TEXTS[-1])) == alone[-1:]
    assert ask(input=TEXTS[-1]) == alone[-1:], "from the prefix cache"
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(ask, input=text) for text in TEXTS * 4]
        assert [future.result()[0] for future in futures] == alone * 4
    many = ask(input=[TEXTS[index % len(TEXTS)] for index in range(700)])  # more inputs than one window of sequences
    assert many == [alone[index % len(TEXTS)] for index in range(700)]


@among("lasttoken", "mean")
def test_dimensions_keep_the_first_numbers_and_normalize_them_again(served: Served) -> None:
    answer = served.server.client.post("/v1/embeddings", json={"input": TEXTS[2], "dimensions": 24}).json()
    vector = answer["data"][0]["embedding"]
    assert len(vector) == 24 and math.isclose(math.hypot(*vector), 1, abs_tol=1e-6)
    assert differ(vector, served.vector(TEXTS[2], dimensions=24)) < 1e-6


@among("lasttoken", "mean")
def test_long_text_is_the_mean_of_its_segments_with_the_same_bits_in_any_company(served: Served) -> None:
    post = served.server.client.post
    longest = served.server.client.get("/v1/models").json()["data"][0]["max_model_len"]
    ids = (tokens(served.folder, TEXTS[-1]) * longest)[: 2 * longest + 5]
    body = {"input": ids, "long_inputs": "mean", "normalize": False}
    assert post("/v1/embeddings", json={"input": ids}).json()["error"]["code"] == "context_length_exceeded"
    (alone,) = post("/v1/embeddings", json=body).json()["data"]
    among_others = post("/v1/embeddings", json={**body, "input": [ids[:9], ids, ids[:20]]}).json()["data"]
    cuts = [len(ids) * at // 3 for at in range(4)]
    parts = [ids[first:last] for first, last in itertools.pairwise(cuts)]
    rows = post("/v1/embeddings", json={"input": parts, "normalize": False}).json()["data"]
    pairs = zip(parts, rows, strict=True)
    total = torch.tensor([[len(part) * number for number in row["embedding"]] for part, row in pairs])
    assert alone["segments"] == 3 and among_others[1]["embedding"] == alone["embedding"]
    assert differ(alone["embedding"], total.sum(0) / len(ids)) < 1e-6


@among("lasttoken")
def test_prompt_name_puts_the_prompt_before_the_text(served: Served) -> None:
    post = served.server.client.post
    named = post("/v1/embeddings", json={"input": "x", "prompt_name": "query"}).json()["data"]
    spelled = post("/v1/embeddings", json={"input": embedders.PROMPTS["query"] + "x"}).json()["data"]
    assert named == spelled
    unknown = post("/v1/embeddings", json={"input": "x", "prompt_name": "passage"})
    assert unknown.status_code == 400 and "`query`, `document`" in unknown.json()["error"]["message"]


@among("lasttoken")
def test_score_of_an_embedding_model_is_the_cosine(served: Served) -> None:
    one, other = TEXTS[:3], TEXTS[3:6]
    body = {"text_1": one, "text_2": other}
    scores = [entry["score"] for entry in served.server.client.post("/v1/score", json=body).json()["data"]]
    wanted = [torch.dot(served.vector(a), served.vector(b)).item() for a, b in zip(one, other, strict=True)]
    assert scores == pytest.approx(wanted, abs=1e-6)


@among("lasttoken")
def test_refusals_name_the_field_and_the_task(served: Served) -> None:
    post = served.server.client.post
    for path, body in {
        "/v1/completions": {"model": "m", "prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/messages": {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
    }.items():
        answer = post(path, json=body)
        assert answer.status_code == 400 and "--task generate" in answer.json()["error"]["message"]
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input"),
        ("/v1/embeddings", {"input": ["a", 5]}, "input"),
        ("/v1/embeddings", {"input": [99999]}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "model"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction"),
    ]
    for path, body, field in wrong:
        answer = post(path, json=body)
        assert 400 <= answer.status_code < 500 and f"`{field}" in answer.json()["error"]["message"], (body, answer.text)
        assert answer.status_code == (404 if field == "model" else 400)
    long = post("/v1/embeddings", json={"input": "a " * 3000})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    served.server.until_idle()


@among("reranker")
def test_reranker_gives_the_probability_of_yes_after_its_cards_prompt(served: Served) -> None:
    query, documents = "stone bridge", [TEXT[0], TEXT[1], "a bridge of stone"]
    judge = "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    assert BEFORE.startswith(f"<|im_start|>system\n{judge}") and AFTER.endswith("<think>\n\n</think>\n\n")

    def wanted(document: str, instruction: str) -> float:
        question = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = [id for part in (BEFORE, question, AFTER) for id in tokens(served.folder, part)]
        logits = next_logits(served.folder, ids)
        yes, no = tokens(served.folder, "yes")[0], tokens(served.folder, "no")[0]
        return float(logits[[no, yes]].double().log_softmax(0)[1].exp())

    client = served.server.client
    expected = [wanted(document, INSTRUCTION) for document in documents]
    body = {"text_1": query, "text_2": documents}
    for path in ("/score", "/v1/score"):
        answer = client.post(path, json=body).json()
        assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected, abs=2e-6)
    order = sorted(range(3), key=lambda index: -expected[index])
    shapes: list[Any] = [documents[0], {"text": documents[1]}, documents[2]]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranking = client.post(path, json={"model": "m", "query": query, "documents": shapes, "top_n": 2}).json()
        assert [entry["index"] for entry in ranking["results"]] == order[:2]
        assert [entry["document"]["text"] for entry in ranking["results"]] == [documents[index] for index in order[:2]]
        assert [entry["relevance_score"] for entry in ranking["results"]] == pytest.approx(
            sorted(expected, reverse=True)[:2], abs=2e-6
        )
    bare = client.post("/rerank", json={"query": query, "documents": shapes, "return_documents": False}).json()
    assert len(bare["results"]) == 3 and not any("document" in entry for entry in bare["results"])
    told = client.post("/score", json={**body, "instruction": "Find code"}).json()["data"]
    assert [entry["score"] for entry in told] == pytest.approx(
        [wanted(one, "Find code") for one in documents], abs=2e-6
    )
    assert [entry["score"] for entry in told] != pytest.approx(expected, abs=1e-4)
    refused = client.post("/v1/embeddings", json={"input": "a"})
    assert refused.status_code == 400 and "--task embed" in refused.json()["error"]["message"]


@among("classifier")
def test_classification_head_gives_the_sigmoid_of_its_logit_for_the_pair(served: Served) -> None:
    queries, documents = list(TEXT[:3]), list(TEXT[1:4])
    answer = served.server.client.post("/v1/score", json={"text_1": queries, "text_2": documents}).json()
    pairs = [tokens(served.folder, *pair) for pair in zip(queries, documents, strict=True)]
    wanted = [class_logits(served.folder, ids).double().sigmoid().item() for ids in pairs]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(wanted, abs=2e-6)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, pairs))


@among("mean")
def test_vector_survives_a_killed_worker_and_a_client_that_leaves_ends_its_request(served: Served) -> None:
    server, body = served.server, {"input": TEXTS, "encoding_format": "base64"}
    undisturbed = server.client.post("/v1/embeddings", json=body).json()["data"]
    with ThreadPoolExecutor(1) as thread, server.hold.at(0):
        answer = thread.submit(server.client.post, "/v1/embeddings", json=body)
        server.hold.wait()
        server.until(lambda stats: stats["running"] + stats["waiting"] == len(TEXTS))  # until all are admitted
        os.kill(server.stats()["workers"][0]["pid"], signal.SIGKILL)
        server.hold.release()
        assert answer.result().json()["data"] == undisturbed
    with server.hold.at(0):
        with pytest.raises(httpx.ReadTimeout):
            server.client.post("/v1/embeddings", json=body, timeout=0.5)
        server.until_idle()
        late = server.client.post("/v1/embeddings", json={**body, "deadline_ms": 200})
        assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
        server.until_idle()
    assert server.client.post("/v1/embeddings", json=body).json()["data"] == undisturbed
    metrics = server.client.get("/metrics").text
    assert 'finished_reason="pooled"' in metrics
    assert re.search(r'sluice_request_success_total\{finished_reason="length",.*\} 0', metrics)


@among("lasttoken")
def test_python_gets_the_same_vectors_and_scores_as_http(served: Served) -> None:
    answer = served.server.client.post("/v1/embeddings", json={"input": TEXTS, "dimensions": 40}).json()["data"]
    scored = served.server.client.post("/score", json={"text_1": TEXTS[0], "text_2": TEXTS[1:3]}).json()["data"]
    with LLM(served.folder, dtype="float32", threads=1) as llm:
        assert llm.embed(TEXTS, dimensions=40) == [entry["embedding"] for entry in answer]
        assert llm.embed(tokens(served.folder, TEXTS[0]), dimensions=40) == answer[0]["embedding"]
        assert llm.score(TEXTS[0], TEXTS[1:3]) == [entry["score"] for entry in scored]
        with pytest.raises(SluiceError, match="`dimensions` is 65"):
            llm.embed("a", dimensions=65)
        with pytest.raises(SluiceError, match="--task embed, which generates no text"):
            llm.generate("a")
