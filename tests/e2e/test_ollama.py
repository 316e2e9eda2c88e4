"""Ollama's official client against real servers: answers, streams, schemas, tools, embeddings."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests import embedders
from tests.e2e.conftest import Served
from tests.e2e.server import Server, serving

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 24}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}


@pytest.fixture(scope="module")
def client(demo: Server) -> Iterator[ollama.Client]:
    with ollama.Client(demo.url) as client:
        yield client


def test_chat_streamed_equals_the_whole_and_openais(client: ollama.Client, demo: Server) -> None:
    whole = client.chat("m", QUESTION, options=GREEDY)
    parts = list(client.chat("m:latest", QUESTION, options=GREEDY, stream=True))
    body = {"model": "m", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    theirs = demo.client.post("/v1/chat/completions", json=body).json()
    assert "Paris" in (whole.message.content or "")
    assert whole.message.content == "".join(part.message.content or "" for part in parts)
    assert whole.message.content == theirs["choices"][0]["message"]["content"]
    assert (whole.done_reason, whole.eval_count) == ("stop", theirs["usage"]["completion_tokens"])
    assert whole.prompt_eval_count == theirs["usage"]["prompt_tokens"]
    assert whole.total_duration and whole.eval_duration and parts[-1].done and len(parts) > 1


def test_generate_remembers_by_its_context(client: ollama.Client) -> None:
    first = client.generate("m", "What is the capital of France?", options=GREEDY)
    again = client.generate("m", "And of Spain?", context=first.context, options=GREEDY)
    raw = client.generate("m", "Once upon a time", raw=True, options=GREEDY)
    assert "Paris" in (first.response or "") and raw.response and raw.context is None
    assert again.prompt_eval_count and first.context and again.prompt_eval_count > len(first.context)


def test_seed_gives_the_same_text(client: ollama.Client) -> None:
    options = {"temperature": 1.0, "seed": 5, "num_predict": 24}
    first, second = [client.generate("m", "A story:", options=options).response for _ in range(2)]
    assert first == second


def test_answer_keeps_to_a_schema(client: ollama.Client) -> None:
    answer = client.chat("m", QUESTION, format=CITY, options={"temperature": 1.0, "num_predict": 64, "seed": 1})
    assert set(json.loads(answer.message.content or "")) == {"city"}


def test_model_is_listed_shown_and_running(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["m:latest"]
    assert [model.model for model in client.ps().models] == ["m:latest"]
    assert "completion" in (client.show("m").capabilities or [])


def test_another_model_is_not_found(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("llama3.2", QUESTION)
    assert caught.value.status_code == 404 and "model 'llama3.2' not found" in caught.value.error


@pytest.mark.parametrize("served", ["qwen3"], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_an_untrained_model_have_arguments_that_keep_to_the_schema(served: Served, stream: bool) -> None:
    tool: Any = {
        "type": "function",
        "function": {"name": "weather", "parameters": CITY | {"additionalProperties": False}},
    }
    with ollama.Client(served.server.url) as client:
        answers = client.chat("m", QUESTION, tools=[tool], options={"num_predict": 200, "seed": 3}, stream=stream)
        parts = list(answers) if stream else [answers]
    calls = [call for part in parts for call in part.message.tool_calls or ()]  # type: ignore[union-attr]
    assert all(call.function.name == "weather" and set(call.function.arguments) == {"city"} for call in calls)
    assert parts[-1].done and parts[-1].done_reason in ("stop", "length")  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("embedder")
    with serving(embedders.embedder(folder / "model"), folder / "log", "--dtype", "float32") as server:
        yield server


def test_embeddings_are_those_of_openais_route(embedder: Server) -> None:
    texts = ["the old stone bridge", "x"]
    body = {"model": "m", "input": texts}
    theirs = [one["embedding"] for one in embedder.client.post("/v1/embeddings", json=body).json()["data"]]
    with ollama.Client(embedder.url) as client:
        ours = client.embed("m", texts)
        assert [list(vector) for vector in ours.embeddings] == theirs and ours.prompt_eval_count
        assert list(client.embed("m", texts[0]).embeddings[0]) == theirs[0]
        assert list(client.embeddings("m", texts[1]).embedding) == theirs[1]
        assert client.show("m").capabilities == ["embedding"]
        with pytest.raises(ollama.ResponseError, match="--task"):
            client.chat("m", QUESTION)


def test_embedding_of_a_model_that_generates_is_refused(client: ollama.Client, tmp_path: Path) -> None:
    with pytest.raises(ollama.ResponseError, match="--task embed"):
        client.embed("m", "x")


@pytest.mark.parametrize("top", [None, 3])
def test_log_probabilities_are_those_of_openais_chat(client: ollama.Client, demo: Server, top: int | None) -> None:
    whole = client.chat("m", QUESTION, options=GREEDY, logprobs=True, top_logprobs=top)
    parts = client.chat("m", QUESTION, options=GREEDY, logprobs=True, top_logprobs=top, stream=True)
    body = {"model": "m", "messages": QUESTION, "temperature": 0, "max_tokens": 24, "logprobs": True}
    theirs = demo.client.post("/v1/chat/completions", json=body | {"top_logprobs": top}).json()
    found = [one.model_dump() for one in whole.logprobs or ()]
    scored = [part.model_dump()["logprobs"] for part in parts if part.logprobs]
    assert [one for line in scored for one in line] == found
    for one, other in zip(found, theirs["choices"][0]["logprobs"]["content"], strict=True):
        assert (one["token"], one["logprob"]) == (other["token"], other["logprob"])
        rivals = [(rival["token"], rival["logprob"]) for rival in one["top_logprobs"] or ()]
        assert rivals == [(rival["token"], rival["logprob"]) for rival in other["top_logprobs"]]
        assert len(rivals) >= (top or 0)
    text = client.generate("m", "Paris", raw=True, options=GREEDY, logprobs=True)
    assert text.logprobs and "".join(one.token for one in text.logprobs).startswith(text.response)


def test_lines_have_no_log_probabilities_unless_asked(client: ollama.Client, demo: Server) -> None:
    body = {"model": "m", "messages": QUESTION, "options": GREEDY, "top_logprobs": 2}
    lines = demo.client.post("/api/chat", json=body).text.splitlines()
    assert lines and not any("logprobs" in line for line in lines)
