"""A call in another form than the format's is a call on every route, whole and streamed, where the text is free."""

import json
from typing import Any

import httpx
import pytest

from tests.fakes import MODEL
from tests.frontend.api.scripted import CITY
from tests.frontend.speaking import Model

CALL = '{"name": "get_weather", "arguments": {"city": "Ulm"}}'
FENCED = f"I look.\n\n```json\n{CALL}\n```"
FORMS = [FENCED, CALL, f"<tools>{CALL}</tools>", '<function=get_weather>{"city": "Ulm"}</function>',
         f"<think>\nI look.\n<tool_call>\n{CALL}\n</tool_call>\n</think>\n"]  # fmt: skip
ORDINARY = '```json\n{"name": "my-package", "arguments": []}\n```\n{"name": "get_weather", "version": 1}'
FUNCTION = {"name": "get_weather", "parameters": CITY}
USER = [{"role": "user", "content": "Weather?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/responses": {"input": "Weather?", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        "messages": USER, "max_tokens": 500, "tools": [{"name": "get_weather", "input_schema": CITY}],
    },
    "/api/chat": {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]},
}  # fmt: skip
MARKS = {"/v1/chat/completions": '"tool_calls":[', "/v1/responses": '"type":"function_call"',
         "/v1/messages": '"type":"tool_use"', "/api/chat": '"tool_calls":['}  # fmt: skip


async def answered(model: Model, path: str, says: str, more: dict[str, Any], **config: Any) -> str:
    model.says = [says]
    async with model.served(**config) as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post(path, json=BODIES[path] | {"model": MODEL} | more)
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
async def test_form_is_a_call_and_ordinary_json_is_text(qwen: Model, path: str, stream: bool) -> None:
    for says in FORMS:
        text = await answered(qwen, path, says, {"stream": stream})
        assert MARKS[path] in text and (stream or "Ulm" in text) and "```" not in text, (says, text)
    assert MARKS[path] not in await answered(qwen, path, ORDINARY, {"stream": stream})
    assert MARKS[path] not in await answered(qwen, path, FENCED, {"stream": stream}, drifting_calls=False)
    grammars = qwen.grammars
    assert "named_0" in grammars[0] and len({*grammars[:-1]}) == 1 and "named_0" not in grammars[-1]


async def test_streamed_call_is_the_whole_one_and_begins_with_its_name(qwen: Model) -> None:
    path = "/v1/chat/completions"
    whole = json.loads(await answered(qwen, path, FENCED, {}))["choices"][0]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] == "I look."
    (call,) = whole["message"]["tool_calls"]
    lines = (await answered(qwen, path, FENCED, {"stream": True})).split("\n\n")
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    pieces = [one["tool_calls"][0]["function"] for one in deltas if one.get("tool_calls")]
    assert pieces[0]["name"] == call["function"]["name"] == "get_weather"
    assert "".join(one.get("arguments") or "" for one in pieces) == call["function"]["arguments"]
    assert "".join(one.get("content") or "" for one in deltas) == "I look."


@pytest.mark.parametrize("more", [
    {"tool_choice": "none"}, {"response_format": {"type": "json_object"}}, {"guided_regex": "(?s:.*)"},
])  # fmt: skip
async def test_text_that_is_not_free_has_no_such_calls(qwen: Model, more: dict[str, Any]) -> None:
    says = CALL if "response_format" in more else FENCED
    body = json.loads(await answered(qwen, "/v1/chat/completions", says, more))
    message = body["choices"][0]["message"]
    assert message["content"] == says and not message.get("tool_calls")
    assert "named_0" not in qwen.grammars[-1]


async def test_stop_string_ends_the_text_before_a_call(qwen: Model) -> None:
    body = json.loads(await answered(qwen, "/v1/chat/completions", FENCED, {"stop": ["```"]}))
    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "I look.\n\n")
    assert not choice["message"].get("tool_calls")


async def test_parallel_calls_are_the_requests_choice(qwen: Model) -> None:
    await answered(qwen, "/v1/chat/completions", FENCED, {})
    await answered(qwen, "/v1/chat/completions", FENCED, {"parallel_tool_calls": False})
    several, single = qwen.grammars
    assert "last_middle" in single and "last_middle" not in several


async def test_reasoning_that_stays_in_the_text_ends_with_a_call(qwen: Model) -> None:
    body = json.loads(await answered(qwen, "/v1/chat/completions", FORMS[-1], {"separate_reasoning": False}))
    message = body["choices"][0]["message"]
    assert message["content"] == "<think>\nI look." and len(message["tool_calls"]) == 1
