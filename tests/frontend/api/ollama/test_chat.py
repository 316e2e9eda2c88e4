"""Ollama's /api/chat over HTTP: the meaning of requests, and refusals."""

from typing import Any

import pytest

from frontend.text.tokenizer import Tokenizer
from shared.messages import WindowPenalties
from tests.fakes import MODEL, FakePool
from tests.frontend.serving import completing, http_client
from tests.frontend.speaking import Model

USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": USER, "stream": False}


async def test_answer_is_one_object_without_stream(tokenizer: Tokenizer) -> None:
    async with http_client(completing(tokenizer), tokenizer) as http:
        answer = await http.post("/api/chat", json=BODY)
    body = answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert body["message"] == {"role": "assistant", "content": "hello"} and body["done"] is True
    ids = tokenizer.encode_now(["hello"], False)[0]
    assert (body["done_reason"], body["eval_count"], body["load_duration"]) == ("length", len(ids), 0)


async def test_options_become_sampling(tokenizer: Tokenizer) -> None:
    options = {
        "temperature": 0.5, "top_k": 0, "top_p": 0.9, "min_p": 0.1, "seed": 7, "num_predict": 9, "stop": ["x"],
        "repeat_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_ctx": 8192, "num_gpu": 1,
        "mirostat": 0, "typical_p": 1.0, "num_thread": 8,
    }  # fmt: skip
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        answer = await http.post("/api/chat", json=BODY | {"options": options, "keep_alive": "5m"})
    assert answer.status_code == 200, answer.text
    [one] = pool.submitted
    chosen = one.sampling
    assert (chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p, chosen.seed) == (0.5, 0, 0.9, 0.1, 7)
    assert (chosen.max_tokens, chosen.repetition_penalty) == (9, 1.25)
    assert (chosen.presence_penalty, chosen.frequency_penalty) == (0.5, 0.25)


async def test_seed_minus_one_asks_for_a_random_seed(tokenizer: Tokenizer) -> None:
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        for path, more in (("chat", {"messages": USER}), ("generate", {"prompt": "hi"})) * 2:
            sent = {"model": MODEL, "stream": False, "options": {"seed": -1}, **more}
            assert (await http.post(f"/api/{path}", json=sent)).status_code == 200
    seeds = {one.sampling.seed for one in pool.submitted}
    assert len(seeds) == 4 and all(seed is not None and 0 <= seed < 1 << 53 for seed in seeds)


async def test_penalties_in_a_window_and_typical_sampling_become_a_chain(tokenizer: Tokenizer) -> None:
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        for options in ({"repeat_last_n": 5}, {"repeat_last_n": 5, "repeat_penalty": 1.5}, {"typical_p": 0.9}):
            assert (await http.post("/api/chat", json=BODY | {"options": options})).status_code == 200
    plain, window, typical = [one.sampling.chain for one in pool.submitted]
    assert plain is None and window is not None and typical is not None
    assert (window.order, window.penalties) == (("penalties",), WindowPenalties(5, 1.5)) and typical.typical_p == 0.9


@pytest.mark.parametrize("limit", [-1, -2, 0, 100_000])
async def test_answer_without_a_limit_goes_to_the_contexts_end(tokenizer: Tokenizer, limit: int) -> None:
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        await http.post("/api/chat", json=BODY | {"options": {"num_predict": limit}})
    [one] = pool.submitted
    assert one.sampling.max_tokens == 512 - len(one.prompt)


@pytest.mark.parametrize("form", ["json", {}, {"type": "object", "properties": {"a": {"type": "integer"}}}])
async def test_format_becomes_a_grammar(tokenizer: Tokenizer, form: Any) -> None:
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        plain = await http.post("/api/chat", json=BODY | {"format": ""})
        asked = await http.post("/api/chat", json=BODY | {"format": form})
    assert plain.status_code == asked.status_code == 200
    assert [bool(one.sampling.grammar) for one in pool.submitted] == [False, True]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, "load"), ({"messages": []}, "load"), ({"keep_alive": "10m"}, "load"), ({"keep_alive": -1}, "load"),
        ({"keep_alive": 0}, "unload"), ({"keep_alive": "0"}, "unload"), ({"keep_alive": "0s"}, "unload"),
    ],
)  # fmt: skip
async def test_request_without_messages_is_answered_at_once(
    tokenizer: Tokenizer, more: dict[str, Any], reason: str
) -> None:
    pool = FakePool()
    async with http_client(pool, tokenizer) as http:
        answer = await http.post("/api/chat", json={"model": MODEL} | more)
    body = answer.json()
    assert (body["done"], body["done_reason"], body["message"]["content"]) == (True, reason, "") and pool.calls == 0


@pytest.mark.parametrize("value", ["soon", "5 minutes", "", "1d", True, [], 1e300])
async def test_keep_alive_that_is_no_duration_is_refused_by_a_server_of_one_model(
    tokenizer: Tokenizer, value: Any
) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        for path, more in (("chat", {}), ("generate", {}), ("embed", {"input": "a"}), ("embeddings", {"prompt": "a"})):
            answer = await http.post(f"/api/{path}", json={"model": MODEL, "keep_alive": value, **more})
            assert answer.status_code == 400 and "`keep_alive` must be" in answer.json()["error"], (path, answer.text)


async def test_all_degrees_of_thinking_of_ollamas_api_are_taken(tokenizer: Tokenizer) -> None:
    async with http_client(completing(tokenizer), tokenizer) as http:
        codes = [
            (await http.post("/api/chat", json=BODY | {"think": one})).status_code
            for one in (True, False, "low", "medium", "high", "max", "much")
        ]
    assert codes == [200] * 6 + [400]


async def test_another_model_is_404_in_ollamas_words(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        for path in ("chat", "generate", "show", "embed", "embeddings"):
            body = {"model": "other:latest", "messages": USER, "prompt": "hi", "input": "hi"}
            fields = {"chat": ("messages",), "generate": ("prompt",), "embed": ("input",), "embeddings": ("prompt",)}
            wanted = {name: body[name] for name in ("model", *fields.get(path, ()))}
            answer = await http.post(f"/api/{path}", json=wanted)
            if path.startswith("embed"):  # the server's task is checked first
                assert answer.status_code == 400 and set(answer.json()) == {"error"}
                continue
            assert (answer.status_code, answer.json()) == (404, {"error": "model 'other:latest' not found"})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "sees no images"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk=", {}]}]}, "`messages[0].images[1]` must be"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"mirostat": 3}}, "options.mirostat"),
        ({"options": {"seed": 1 << 64}}, "options.seed"),
        ({"options": {"seed": -1e308}}, "options.seed"),
        ({"options": {"repeat_last_n": -2}}, "options.repeat_last_n"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"format": {"enum": []}}, "format.enum"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"think": "deeply"}, "think"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(tokenizer: Tokenizer, change: dict[str, Any], word: str) -> None:
    pool = FakePool()
    async with http_client(pool, tokenizer) as http:
        answer = await http.post("/api/chat", json=BODY | change)
    assert answer.status_code == 400 and list(answer.json()) == ["error"] and pool.calls == 0
    assert word in answer.json()["error"]


async def test_think_turns_thinking_on_and_off(qwen: Model) -> None:
    qwen.says = ["a", "b", "c"]
    async with http_client(qwen.pool, qwen.tokenizer) as http:
        for think in (False, True, "low"):
            assert (await http.post("/api/chat", json=BODY | {"think": think})).status_code == 200
    assert [prompt.endswith("</think>\n\n") for prompt in qwen.prompts] == [True, False, False]


async def test_assistants_message_at_the_end_is_continued(tokenizer: Tokenizer) -> None:
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        await http.post("/api/chat", json=BODY | {"messages": [*USER, {"role": "assistant", "content": "Well, "}]})
    assert tokenizer.decode(pool.submitted[0].prompt).endswith("Well, ")
