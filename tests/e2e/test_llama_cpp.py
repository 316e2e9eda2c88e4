"""llama.cpp's routes on real servers, with cases from llama.cpp's own tests of its server."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import embedders
from tests.checkpoints import Checkpoints
from tests.e2e.server import ROOT, Server, serving

MEANING = "I believe the meaning of life is"
N_CTX, SLOTS = 256, 2
EXCLUDED = ["i", "I", "the", "The", "to", "a", "an", "be", "is", "was", "and", "so", "you", "he", "she", "we", "it"]


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("llama") / "log"
    limits = ("--max-seq-len", str(N_CTX), "--max-batch-size", str(SLOTS), "--max-waiting-requests", "2")
    limits += ("--max-logprobs", "-1")
    with serving(checkpoints("llama"), log, "--dtype", "float32", *limits, held=True) as one:
        yield one


def post(server: Server, path: str = "/completion", **body: Any) -> Any:
    answer = server.client.post(path, json={"prompt": MEANING} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(server: Server, **body: Any) -> list[dict[str, Any]]:
    answer = server.client.post("/completion", json={"prompt": MEANING, "stream": True} | body)
    return [json.loads(block.removeprefix("data: ")) for block in answer.text.split("\n\n") if block]


@pytest.mark.parametrize("return_tokens", [False, True])
def test_completion(server: Server, return_tokens: bool) -> None:
    body = post(server, n_predict=8, return_tokens=return_tokens, cache_prompt=False, ignore_eos=True)
    timings = body["timings"]
    assert (timings["prompt_n"], timings["cache_n"]) == (body["tokens_evaluated"], 0)
    assert (timings["predicted_n"], body["tokens_predicted"], body["stop_type"]) == (8, 8, "limit")
    assert timings["prompt_ms"] > 0 and timings["predicted_per_second"] > 0
    assert body["truncated"] is False and type(body["has_new_line"]) is bool
    assert len(body["tokens"]) == (8 if return_tokens else 0)


def test_stream_has_the_tokens_of_the_whole(server: Server) -> None:
    fields = {"n_predict": 16, "seed": 42, "temperature": 0.8}
    whole = post(server, **fields, return_tokens=True)
    *parts, last = stream(server, **fields)
    assert [id for part in parts for id in part["tokens"]] == whole["tokens"]
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert last["stop"] and last["stop_type"] == whole["stop_type"] and last["generation_settings"]["seed"] == 42
    assert last["timings"]["predicted_n"] == whole["tokens_predicted"]


def test_seed_gives_the_same_text_and_another_one_another(server: Server) -> None:
    texts = [post(server, n_predict=24, seed=seed, temperature=1.0)["content"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_cache_does_not_change_the_text(server: Server) -> None:
    first, again, fresh = [post(server, n_predict=24, seed=3, cache_prompt=cached) for cached in (True, True, False)]
    assert first["content"] == again["content"] == fresh["content"] and fresh["tokens_cached"] == 0


def test_prompt_that_is_too_long(server: Server) -> None:
    answer = server.client.post("/completion", json={"prompt": MEANING * 64})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", N_CTX)
    assert error["n_prompt_tokens"] > N_CTX and "exceeds the available context size" in error["message"]


@pytest.mark.parametrize(("limit", "truncated"), [(64, False), (-1, True)])
def test_answer_goes_on_to_the_contexts_end(server: Server, limit: int, truncated: bool) -> None:
    body = post(server, prompt="Hi how are you", n_predict=limit, ignore_eos=True)
    predicted = limit if limit > 0 else N_CTX - body["tokens_evaluated"]
    assert (body["timings"]["predicted_n"], body["truncated"]) == (predicted, truncated)


def test_tokens_as_input(server: Server) -> None:
    tokens = server.client.post("/tokenize", json={"content": MEANING, "add_special": True}).json()["tokens"]
    greedy = {"temperature": 0.0, "n_predict": 8}
    one = post(server, prompt=tokens, **greedy)
    for prompt in ([tokens, tokens], [tokens, MEANING], [tokens, {"prompt_string": MEANING}]):
        several = post(server, prompt=prompt, **greedy)
        assert [each["content"] for each in several] == [one["content"]] * 2
    assert isinstance(post(server, prompt=[1, 2, 3, MEANING, 7, 8, MEANING], **greedy)["content"], str)


def test_response_fields(server: Server) -> None:
    chosen = ["content", "generation_settings/n_predict", "prompt"]
    body = post(server, n_predict=32, response_fields=chosen)
    assert list(body) == chosen and body["generation_settings/n_predict"] == 32 and body["prompt"].endswith(MEANING)
    assert "generation_settings" in post(server, n_predict=8, response_fields=[])


def test_probabilities(server: Server) -> None:
    fields = {"n_probs": 10, "temperature": 0.0, "n_predict": 5, "ignore_eos": True}
    tokens = post(server, **fields)["completion_probabilities"]
    assert len(tokens) == 5
    for token in tokens:
        assert token["logprob"] <= 0 and isinstance(token["token"], str) and isinstance(token["bytes"], list)
        assert len(token["top_logprobs"]) == 10 and token["top_logprobs"][0]["id"] == token["id"]
    *parts, _ = stream(server, **fields)
    assert [part["completion_probabilities"] for part in parts] == [[token] for token in tokens]


def test_probabilities_of_the_whole_vocabulary(server: Server) -> None:
    (native,) = post(server, n_probs=1 << 20, n_predict=1, temperature=0.0)["completion_probabilities"]
    found = {rival["id"]: rival["logprob"] for rival in native["top_logprobs"]}
    assert [*found] != sorted(found) and sorted(found) == [*range(len(found))] and len(found) > 200
    assert sum(map(math.exp, found.values())) == pytest.approx(1, abs=1e-4)
    asked = {
        "max_tokens": 2,
        "temperature": 0,
        "logprobs": -1,
        "prompt_logprobs": -1,
        "return_tokens_as_token_ids": True,
    }
    (choice,) = post(server, "/v1/completions", **asked)["choices"]
    first, _ = choice["logprobs"]["top_logprobs"]
    assert first == pytest.approx({f"token_id:{id}": logprob for id, logprob in found.items()}, abs=1e-5)
    assert {len(place) for place in choice["prompt_logprobs"][1:]} == {len(found)}


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 12, "top_p": 0.9}])
def test_probabilities_after_sampling(server: Server, fields: dict[str, Any]) -> None:
    body = post(server, n_probs=20, n_predict=5, post_sampling_probs=True, **fields)
    for token in body["completion_probabilities"]:
        assert 0.0 < token["prob"] <= 1.0 and token["id"] in [rival["id"] for rival in token["top_probs"]]
        assert abs(sum(rival["prob"] for rival in token["top_probs"]) - 1.0) < 1e-6


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("bias", [-100, False])
def test_logit_bias_by_text(demo: Server, as_object: bool, bias: float) -> None:
    pairs: list[list[Any]] = [[" " + word, bias] for word in EXCLUDED]
    given = dict(pairs) if as_object else pairs
    plain, body = [
        post(demo, prompt="Once upon a time", n_predict=48, temperature=0.0, **more)
        for more in ({}, {"logit_bias": given})
    ]
    assert any(f" {word} " in plain["content"] for word in EXCLUDED)
    assert not any(f" {word} " in body["content"] for word in EXCLUDED)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"grammar": 'root ::= "a"{5,5}'}, "aaaaa"),
        ({"json_schema": {"const": "42"}}, '"42"'),
        ({"json_schema": {"type": "integer", "minimum": 7, "maximum": 7}}, "7"),
    ],
)
def test_grammar_and_schema(server: Server, fields: dict[str, Any], expected: str) -> None:
    body = post(server, n_predict=16, **fields)
    assert (body["content"], body["stop_type"]) == (expected, "eos")


def test_stop_word(demo: Server) -> None:
    fields = {"prompt": "Once upon a time", "temperature": 0.0, "n_predict": 24}
    whole = post(demo, **fields)["content"]
    word = whole.split()[3]
    body = post(demo, **fields, stop=[word])
    assert (body["stop_type"], body["stopping_word"], body["content"]) == ("word", word, whole[: whole.index(word)])


def test_parallel_requests_take_slots(server: Server) -> None:
    assert server.client.get("/props").json()["total_slots"] == SLOTS
    with ThreadPoolExecutor(2) as threads, server.hold.at(tokens=8):
        asked = [threads.submit(post, server, n_predict=32, seed=seed, ignore_eos=True) for seed in range(2)]
        deadline = time.monotonic() + 60
        busy = 0
        while busy != 2:
            assert time.monotonic() < deadline
            slots = server.client.get("/slots").json()
            assert len(slots) == SLOTS and all("params" not in slot for slot in slots)
            busy = sum(slot["is_processing"] for slot in slots)
        server.hold.release()
        assert all(len(one.result()["content"]) > 10 for one in asked)


def test_request_of_a_client_that_left_frees_its_slot(server: Server) -> None:
    with server.hold.at(tokens=8), pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/completion", json={"prompt": MEANING, "ignore_eos": True}, timeout=0.5)
    server.until_idle()
    deadline = time.monotonic() + 30
    while any(slot["is_processing"] for slot in server.client.get("/slots").json()):
        assert time.monotonic() < deadline


def test_progress_and_timings(server: Server) -> None:
    prompt = "one " * 40
    first, second = [
        stream(server, prompt=prompt, n_predict=4, return_progress=True, timings_per_token=True)[0] for _ in range(2)
    ]
    told = first["prompt_progress"]
    assert told["total"] == told["processed"] == first["tokens_evaluated"] and told["time_ms"] > 0
    assert told["cache"] == 0 < second["prompt_progress"]["cache"] < told["total"]
    assert first["timings"]["prompt_n"] == told["total"]


def test_tokenize_detokenize(server: Server) -> None:
    content = "This is a test string with unicode 媽 and emoji 🤗"
    pieces = server.client.post("/tokenize", json={"content": content, "with_pieces": True}).json()["tokens"]
    assert all(isinstance(one["id"], int) and len(one["piece"]) > 0 for one in pieces)
    back = server.client.post("/detokenize", json={"tokens": [one["id"] for one in pieces]}).json()
    assert back["content"].strip() == content


def test_template_and_completion_make_a_chat(demo: Server) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = demo.client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    body = post(demo, prompt=prompt, temperature=0.0, n_predict=24)
    chat = {"messages": messages, "temperature": 0.0, "max_tokens": 24}
    theirs = demo.client.post("/chat/completions", json=chat).json()
    assert body["content"] == theirs["choices"][0]["message"]["content"] and body["stop_type"] == "eos"


def test_time_limit_ends_an_answer_at_a_line_break(server: Server) -> None:
    grammar = 'root ::= ("a" "\\n")+'
    body = post(server, grammar=grammar, n_predict=200, ignore_eos=True, t_max_predict_ms=1)
    assert (body["stop_type"], body["truncated"], body["has_new_line"]) == ("limit", False, True)
    assert 2 <= body["tokens_predicted"] < 200


def test_receipt_of_an_answer_is_checked(server: Server) -> None:
    request = {"prompt": MEANING, "n_predict": 12, "seed": 4, "receipt": True}
    receipt = post(server, **request)["receipt"]
    verdict = server.client.post("/v1/receipts/verify", json={"receipt": receipt, "request": request}).json()
    assert verdict["identical"] is True, verdict


def test_embeddings_are_those_of_openais_route(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("embedder")
    with serving(embedders.embedder(folder / "model"), folder / "log", "--dtype", "float32") as server:
        texts = ["the old stone bridge", "x"]
        theirs = server.client.post("/v1/embeddings", json={"input": texts}).json()["data"]
        for path, field in (("/embedding", "content"), ("/embeddings", "input")):
            ours = server.client.post(path, json={field: texts}).json()
            assert [one["embedding"] for one in ours] == [[one["embedding"]] for one in theirs]
        of_tokens = server.client.post("/embedding", json={"content": texts, "pooling": "none"}).json()
        body = {"input": texts, "task": "token_embed", "normalize": False}
        same = server.client.post("/pooling", json=body).json()["data"]
        assert [one["embedding"] for one in of_tokens] == [one["data"] for one in same] and len(same[0]["data"]) > 2
        answer = server.client.post("/reranking", json={"query": "bridge", "documents": texts, "top_n": 1}).json()
        assert len(answer["results"]) == 1
        refused = server.client.post("/completion", json={"prompt": "a"})
        assert refused.status_code == 400 and "--task generate" in refused.json()["error"]["message"]


def test_recorded_answers_are_replayed(tmp_path: Path) -> None:
    record = tmp_path / "record"
    with serving("demo", tmp_path / "log", "--record", str(record), "--record-text") as server:
        post(server, n_predict=8)
        post(server, prompt=["a", "b"], n_predict=8, n_cmpl=2)
        stream(server, n_predict=8, n_probs=2, seed=5)
        command = [sys.executable, "-m", "deploy.cli.main", "replay", str(record), "--url", server.url]
        time.sleep(0.5)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
