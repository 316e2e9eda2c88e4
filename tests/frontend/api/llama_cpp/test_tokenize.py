"""/tokenize and /detokenize in llama.cpp's shape. tests/frontend/api/test_tokenize.py tests vLLM's shape."""

from typing import Any

import pytest

from frontend.text.tokenizer import Tokenizer
from tests.fakes import FakePool
from tests.frontend.serving import http_client


async def tokens(tokenizer: Tokenizer, **body: Any) -> Any:
    async with http_client(FakePool(), tokenizer) as http:
        answer = await http.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


async def test_special_tokens_are_added_and_recognized_as_asked(tokenizer: Tokenizer) -> None:
    spelled = list(b"<s>")
    assert await tokens(tokenizer, content="a") == [64]
    assert await tokens(tokenizer, content="a", add_special=True) == [264, 64]
    assert await tokens(tokenizer, content="<s>a") == [264, 64]
    assert len(await tokens(tokenizer, content="<s>a", parse_special=False)) == len(spelled) + 1
    assert await tokens(tokenizer, content="") == []


async def test_texts_and_ids_may_be_mixed(tokenizer: Tokenizer) -> None:
    assert await tokens(tokenizer, content=[65, "a", 66]) == [65, 64, 66]
    assert await tokens(tokenizer, content=["a", 65, "c"], add_special=True) == [264, 64, 65, 66]
    assert await tokens(tokenizer, content=[65, "a"], add_special=True) == [65, 64]


async def test_pieces_are_texts_or_bytes(tokenizer: Tokenizer) -> None:
    found = await tokens(tokenizer, content="<s>a€", with_pieces=True)
    assert found[:2] == [{"id": 264, "piece": "<s>"}, {"id": 64, "piece": "a"}]
    assert bytes(byte for one in found[2:] for byte in one["piece"]) == "€".encode()


async def test_tokens_come_back_as_content(tokenizer: Tokenizer) -> None:
    text = "What is the capital of France ?"
    async with http_client(FakePool(), tokenizer) as http:
        ids = (await http.post("/tokenize", json={"content": text})).json()["tokens"]
        assert (await http.post("/detokenize", json={"tokens": ids})).json()["content"] == text


@pytest.mark.parametrize("body", [{"content": "a", "prompt": "a"}, {"content": [999]}, {"content": 5}])
async def test_contradiction_and_unknown_ids_are_refused(tokenizer: Tokenizer, body: dict[str, Any]) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        assert (await http.post("/tokenize", json=body)).status_code == 400
