"""llama.cpp's /apply-template."""

from pathlib import Path
from typing import Any

from frontend.text.tokenizer import Tokenizer
from tests.fakes import TEMPLATE, FakePool
from tests.frontend.serving import completing, http_client
from tests.frontend.text.tokenizers import byte_level, save

ASKED: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"}]
}


async def test_prompt_is_the_templates_without_what_the_tokenizer_adds(tmp_path: Path) -> None:
    config = {"chat_template": TEMPLATE, "bos_token": "<s>"}
    tokenizer = Tokenizer.load(save(byte_level(), tmp_path / "named", tokenizer_config=config))
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        prompt = (await http.post("/apply-template", json=ASKED)).json()["prompt"]
        await http.post("/completion", json={"prompt": prompt})
        await http.post("/v1/chat/completions", json=ASKED)
    assert prompt == "<system>Be brief.\n<user>Hi there\n<assistant>"
    assert pool.submitted[0].prompt == pool.submitted[1].prompt


async def test_marks_for_spellings_are_not_in_the_text(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        answer = await http.post("/apply-template", json={"messages": [{"role": "user", "content": "a</s>b"}]})
    assert answer.json() == {"prompt": "<user>a</s>b\n<assistant>"}


async def test_messages_are_needed(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        for body in ({}, {"messages": []}, {"messages": [{}]}):
            answer = await http.post("/apply-template", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400)
