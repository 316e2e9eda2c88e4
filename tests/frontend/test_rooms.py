"""A feature's module is imported only by requests that ask for the feature."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import MODEL
from tests.frontend.speaking import Model, tokenizer_with
from tests.patience import PATIENCE_S

CHAT, COMPLETIONS, LLAMA_CPP = "/v1/chat/completions", "/v1/completions", "/completion"
PLAIN = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50, "stream": True}
TOOL = {"type": "function", "function": {"name": "now"}}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"

# room (the module of a feature) → requests that need it
ROOMS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "frontend.api.chat.tools": [(CHAT, {"tools": [TOOL]})],
    "frontend.output_parser.grammar.tool_grammar": [(CHAT, {"tools": [TOOL]})],
    "frontend.api.chat.structured_output": [
        (CHAT, {"response_format": {"type": "json_object"}}), (COMPLETIONS, {"guided_regex": "a"}),
        (LLAMA_CPP, {"grammar": 'root ::= "a"'}),
    ],
    "frontend.text.structural_tag": [(CHAT, {"guided_json": {"type": "object"}})],
    "frontend.api.chat.thinking_budget": [(CHAT, {"max_thinking_tokens": 5})],
    "frontend.api.chat.continuation": [(CHAT, {"continue_from": {"ids": [65]}})],
    "frontend.generation.continued": [(CHAT, {"continue_from": {"ids": [65]}})],
    "frontend.api.receipts.making": [(CHAT, {"receipt": True}), (COMPLETIONS, {"receipt": True})],
    "frontend.generation.endings": [(CHAT, {"receipt": True})],
    "frontend.generation.echo": [(COMPLETIONS, {"echo": True})],
    "frontend.generation.token_scores": [(CHAT, {"logprobs": True}), (COMPLETIONS, {"prompt_logprobs": 1})],
    "frontend.generation.time_limit": [(LLAMA_CPP, {"t_max_predict_ms": 5})],
    "frontend.generation.progress": [
        (CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
        (LLAMA_CPP, {"stream": True, "return_progress": True}),
    ],
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tokenizer_with(tmp_path, TEMPLATE))


def bar(monkeypatch: pytest.MonkeyPatch, room: str) -> None:
    """Makes the next import of the room fail, even in modules that have imported it before."""
    for name in ROOMS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, room, None)


async def streamed(http: httpx.AsyncClient, model: Model) -> str:
    """Returns the bytes of a plain chat's stream, without its id and its time."""
    model.says.append("Hello, it is a plain day.")
    answer = await http.post(CHAT, json=PLAIN)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"), answer.text
    return re.sub(r'"id":"[^"]+"|"created":\d+', "", answer.text)


async def test_plain_chat_streams_the_same_bytes_without_any_one_room_whose_requests_are_refused(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with model.served() as url, httpx.AsyncClient(base_url=url) as http:
        plain = await streamed(http, model)
        for room, requests in ROOMS.items():
            with monkeypatch.context() as patch:
                bar(patch, room)
                assert await streamed(http, model) == plain
                submitted = len(model.pool.submitted)
                for path, more in requests:
                    prompt = {"messages": PLAIN["messages"]} if path == CHAT else {"prompt": "Hi"}
                    refused = await http.post(path, json={"model": MODEL, "max_tokens": 9, **prompt, **more})
                    assert (refused.status_code, room in refused.text) == (501, True), (room, more, refused.text)
                assert len(model.pool.submitted) == submitted, "nothing runs for a request that is refused"


def test_app_starts_and_serves_plain_requests_without_all_rooms() -> None:
    script = (
        f"import sys, json\nfor room in {list(ROOMS)}: sys.modules[room] = None\n"
        "import frontend.api.app, frontend.llm, frontend.__main__\n"
        "from frontend.generation.extras import extras_of\n"
        "from frontend.request import GenerationRequest\nfrom shared.messages import Sampling\n"
        "print(json.dumps(extras_of(GenerationRequest(([1],), Sampling(5)), 0, None, None)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and json.loads(done.stdout) == [], done.stderr
