"""Fields that ask for reasoning, sent to models that do not think: served, and named as ignored."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import MODEL
from tests.frontend.speaking import Model, tokenizer_with
from tests.templates import PLAIN, QWEN3

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CHAT, SWITCH = "/v1/chat/completions", "chat_template_kwargs"
ASKED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/messages", {"max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 4096}}, "thinking"),
    ("/v1/messages", {"max_tokens": 50, "thinking": {"type": "adaptive"}}, "thinking"),
    ("/v1/messages", {"max_tokens": 50, "output_config": {"effort": "high"}}, "output_config.effort"),
    ("/v1/messages", {"max_tokens": 50, "thinking": {"type": "disabled"}}, ""),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"reasoning_effort": "none"}, ""),
    (CHAT, {"reasoning": {"effort": "low", "max_tokens": 9}}, "reasoning.effort, reasoning.max_tokens"),
    (CHAT, {"thinking_budget": 9, "unheard": 1}, "unheard, thinking_budget"),
    (CHAT, {SWITCH: {"enable_thinking": True}}, f"{SWITCH}.enable_thinking"),
    (CHAT, {}, ""),
    ("/v1/responses", {"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning.effort"),
    ("/api/chat", {"think": True, "stream": False}, "think"),
    ("/api/chat", {"think": "high", "stream": False}, "think"),
    ("/api/generate", {"think": True, "stream": False}, "think"),
    ("/api/generate", {"think": False, "stream": False}, ""),
]  # fmt: skip


def body(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    said = {"/v1/responses": {"input": "hi"}, "/api/generate": {"prompt": "hi"}}.get(path, HELLO)
    return {"model": MODEL, **said, **fields}


@pytest.mark.parametrize("template", [PLAIN, QWEN3], ids=["does not think", "thinks"])
async def test_asking_a_model_that_does_not_think_is_served_and_named(template: str, tmp_path: Path) -> None:
    model = Model(tokenizer_with(tmp_path, template, ["</think>"]), ["Hello."] * len(ASKED))
    async with model.served() as url, httpx.AsyncClient(base_url=url) as http:
        for path, fields, named in ASKED:
            answer = await http.post(path, json=body(path, fields))
            assert answer.status_code == 200 and "Hello." in answer.text, (path, fields, answer.text)
            wanted = named if template is PLAIN else "unheard" if "unheard" in fields else ""
            assert answer.headers.get("x-sluice-ignored-fields", "") == wanted, (path, fields)
