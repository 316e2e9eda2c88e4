"""Ollama's /api/generate over HTTP: prompts, the `context` that clients send back, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL, FakePool
from tests.frontend.serving import completing, http_client
from tests.frontend.speaking import Model, tokenizer_with
from tests.templates import QWEN3

BODY: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "stream": False}


async def test_prompt_is_a_chat_of_one_turn_with_its_system_message(tokenizer: Tokenizer) -> None:
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        answer = await http.post("/api/generate", json=BODY | {"system": "Be brief."})
    prompt = pool.submitted[0].prompt
    assert tokenizer.decode(prompt, skip_special=False) == "<system>Be brief.\n<user>Hi\n<assistant>"
    body = answer.json()
    assert (body["response"], body["done"], body["done_reason"]) == ("hello", True, "length")
    assert body["context"] == [*prompt, *tokenizer.encode_now(["hello"], False)[0]]


async def test_raw_prompt_is_continued_as_it_is_and_has_no_context(tokenizer: Tokenizer) -> None:
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        answer = await http.post("/api/generate", json=BODY | {"raw": True})
    assert pool.submitted[0].prompt == (await tokenizer.encode("Hi"))
    assert "context" not in answer.json()


async def test_context_stands_before_the_next_prompt(tokenizer: Tokenizer) -> None:
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        context = (await http.post("/api/generate", json=BODY)).json()["context"]
        await http.post("/api/generate", json=BODY | {"context": context})
        wrong = await http.post("/api/generate", json=BODY | {"context": [1 << 20]})
    assert pool.submitted[1].prompt[: len(context)] == context and wrong.status_code == 400


async def test_stream_has_parts_and_the_context_in_its_last_line(tokenizer: Tokenizer) -> None:
    async with http_client(completing(tokenizer), tokenizer) as http:
        answer = await http.post("/api/generate", json={"model": MODEL, "prompt": "Hi"})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["response"] for line in lines) == "hello"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert ["context" in line for line in lines] == [False] * (len(lines) - 1) + [True]


async def test_thoughts_are_told_apart(qwen: Model) -> None:
    qwen.says = ["<think>\nHm.\n</think>\n\nYes."]
    async with http_client(qwen.pool, qwen.tokenizer) as http:
        body = (await http.post("/api/generate", json=BODY)).json()
    assert (body["response"].strip(), body["thinking"].strip()) == ("Yes.", "Hm.")


async def test_suffix_makes_a_prompt_for_the_middle(folder: Path) -> None:
    marks = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    coder = Model(tokenizer_with(folder / "coder", QWEN3, marks), ["b"])
    async with http_client(coder.pool, coder.tokenizer) as http:
        body = (await http.post("/api/generate", json=BODY | {"prompt": "a", "suffix": "c"})).json()
        coder.says.append("b")
        begin = (await http.post("/api/generate", json=BODY | {"prompt": "", "suffix": "c"})).json()
    assert coder.prompts[1].endswith("<fim_prefix><fim_suffix>c<fim_middle>") and begin["response"] == "b"
    assert coder.prompts[0].endswith("<fim_prefix>a<fim_suffix>c<fim_middle>") and body["response"] == "b"


async def test_request_without_a_prompt_is_answered_at_once(tokenizer: Tokenizer) -> None:
    pool = FakePool()
    async with http_client(pool, tokenizer) as http:
        body = (await http.post("/api/generate", json={"model": MODEL})).json()
    assert (body["response"], body["done_reason"], pool.calls) == ("", "load", 0)


@pytest.mark.parametrize("change", [{"template": "{{ .Prompt }}"}, {"suffix": "x"}])
async def test_what_cannot_be_done_is_refused_by_name(tokenizer: Tokenizer, change: dict[str, Any]) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        answer = await http.post("/api/generate", json=BODY | change)
    assert answer.status_code == 400 and f"`{next(iter(change))}`" in answer.json()["error"]


async def test_model_without_sight_refuses_images(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        answer = await http.post("/api/generate", json=BODY | {"images": ["aGk="]})
    assert answer.status_code == 400 and "sees no images" in answer.json()["error"]
