"""Reasoning, calls and text in Ollama's answers: the official client against the app with a scripted model."""

from typing import Any

import httpx
import ollama
import pytest

from shared.messages import Outcome
from tests.fakes import MODEL
from tests.frontend.api.scripted import CALLED, CITY, HISTORY, SAID, WEATHER
from tests.frontend.speaking import Model

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
CUT = WEATHER[: WEATHER.index("Paris") + 2]


async def said(client: ollama.AsyncClient, stream: bool, **fields: Any) -> tuple[str, str, list[Any], Any]:
    """Returns text, thoughts, calls and the object with the statistics."""
    if not stream:
        whole = await client.chat(**fields)
        parts = [whole]
    else:
        parts = [part async for part in await client.chat(**fields, stream=True)]
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    messages = [part.message for part in parts]
    calls = [(call.function.name, dict(call.function.arguments)) for one in messages for call in one.tool_calls or ()]
    text, thoughts = "".join(one.content or "" for one in messages), "".join(one.thinking or "" for one in messages)
    return text, thoughts, calls, parts[-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_text_and_calls_are_told_apart(qwen: Model, stream: bool) -> None:
    qwen.says = [SAID]
    async with qwen.served() as url, ollama.AsyncClient(url) as client:
        text, thoughts, calls, end = await said(client, stream, model=MODEL, messages=ASKED, tools=TOOLS)
    assert (text.strip(), thoughts.strip()) == ("I look.", "Hm.")
    assert calls == [("get_weather", {"city": "Paris"}), ("now", {})]
    assert (end.done, end.done_reason, end.model) == (True, "stop", MODEL)
    assert end.eval_count == len(qwen.tokenizer.encode_now([SAID], False)[0])
    assert (end.prompt_eval_duration, end.eval_duration, end.total_duration) == (2_000_000, 3_000_000, 6_000_000)


@pytest.mark.parametrize("stream", [False, True])
async def test_call_that_is_cut_off_is_not_told(qwen: Model, stream: bool) -> None:
    qwen.says, qwen.outcome = ["<think>\n\n</think>\n\nI look.\n" + CUT], Outcome.LENGTH
    async with qwen.served() as url, ollama.AsyncClient(url) as client:
        text, _, calls, end = await said(client, stream, model=MODEL, messages=ASKED, tools=TOOLS)
    assert (text.strip(), calls, end.done_reason) == ("I look.", [], "length")


async def test_history_with_calls_reaches_the_template(gpt_oss: Model) -> None:
    gpt_oss.says = [CALLED, "<|channel|>final<|message|>Sunny.<|return|>"]
    async with gpt_oss.served() as url, ollama.AsyncClient(url) as client:
        first = await client.chat(MODEL, ASKED, tools=TOOLS)
        result = {"role": "tool", "content": "20°", "tool_name": "get_weather"}
        second = await client.chat(MODEL, [*ASKED, first.message, result], tools=TOOLS)
    assert gpt_oss.prompts[1].endswith(HISTORY)
    assert (second.message.content, second.message.thinking) == ("Sunny.", None)


async def test_stream_is_lines_of_json_with_the_head_in_each(qwen: Model) -> None:
    qwen.says = ["<think>\n\n</think>\n\nline\nline"]
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/api/chat", json={"model": f"{MODEL}:latest", "messages": ASKED})
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = answer.text.splitlines()
    assert len(lines) > 2 and answer.text.endswith("}\n")
    assert all(line.startswith(f'{{"model":"{MODEL}:latest","created_at":"20') for line in lines)
    assert '"done":true' in lines[-1] and '"content":""' in lines[-1]


async def test_failed_stream_ends_with_an_error_that_the_client_raises(qwen: Model) -> None:
    qwen.says, qwen.outcome = ["Hm."], Outcome.ERROR
    async with qwen.served() as url, ollama.AsyncClient(url) as client:
        with pytest.raises(ollama.ResponseError):
            await said(client, True, model=MODEL, messages=ASKED)
