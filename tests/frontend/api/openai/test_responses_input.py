"""Requests that /v1/responses accepts and refuses, and the prompt that items become."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import MODEL
from tests.frontend.api.scripted import CITY, openai_sdk
from tests.frontend.serving import http_client
from tests.frontend.speaking import Model, tokenizer_with

TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "description": "Of a city.", "parameters": CITY},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]


CHAT_TOOLS = [{"type": "function", "function": {"name": "now"}}]


ASKED: dict[str, Any] = {"model": MODEL, "input": "Weather?", "max_output_tokens": 500}


CHATTED = "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"


async def sent(model: Model, **more: Any) -> httpx.Response:
    async with http_client(model.pool, model.tokenizer) as http:
        return await http.post("/v1/responses", json=ASKED | more)


async def post(model: Model, **more: Any) -> Any:
    return (await sent(model, **more)).json()


async def test_message_item_in_every_form_gives_the_same_prompt(qwen: Model) -> None:
    part = {"type": "input_text", "text": "Weather?"}
    old = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "phase": None}
    said = [{**old, "content": [{"type": "output_text", "text": "Hi.", "annotations": [], "logprobs": None}]}]
    forms: list[Any] = [
        "Weather?", [{"role": "user", "content": "Weather?"}], [{"role": "user", "content": [part]}],
        [{"type": "message", "role": "user", "content": [part, {**part, "text": ""}]}],
        [{"role": "user", "content": "Hello"}, *said, {"role": "user", "content": "Weather?"}],
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."},
         {"role": "user", "content": "Weather?"}],
        [{"role": "user", "content": "Hello"}, {**old, "content": [{"type": "refusal", "refusal": "Hi."}]},
         {"role": "user", "content": "Weather?"}],
    ]  # fmt: skip
    qwen.says = ["Hi."] * 9
    for form in forms:
        await post(qwen, input=form)
    await post(qwen, instructions="Be brief.")
    await post(qwen, input=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Weather?"}])
    assert set(qwen.prompts[:4]) == {CHATTED}
    hello = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n"
    assert set(qwen.prompts[4:7]) == {hello + CHATTED}
    assert set(qwen.prompts[7:]) == {f"<|im_start|>system\nBe brief.<|im_end|>\n{CHATTED}"}


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


CALLED = {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"}


def assistant(text: str, status: str) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text}] if text else []
    return {"type": "message", "role": "assistant", "status": status, "content": parts}


async def test_message_of_the_assistant_may_be_empty(qwen: Model) -> None:
    qwen.says = ["Hi."]
    asked = {"role": "user", "content": "Weather?"}
    answer = await sent(qwen, input=[{"role": "user", "content": "Hello"}, assistant("", "incomplete"), asked])
    before = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    assert answer.status_code == 200 and qwen.prompts == [before + CHATTED]


@pytest.mark.parametrize("status", ["in_progress", "incomplete"])
async def test_answer_continues_a_text_that_was_cut_off(qwen: Model, status: str) -> None:
    qwen.says = [" sunny."] * 4
    asked = {"role": "user", "content": "Weather?"}
    answer = await post(qwen, input=[asked, assistant("It is", status)])
    await post(qwen, input=[asked, assistant("It is", "completed")])
    await post(qwen, input=[asked, assistant("It is", status), {"role": "user", "content": "Go on"}])
    await post(qwen, input=[asked, assistant("", status)])
    closed = f"{CHATTED}It is<|im_end|>\n<|im_start|>"
    assert answer["output"][0]["content"][0]["text"] == " sunny."
    assert qwen.prompts[:2] == [f"{CHATTED}It is", f"{closed}assistant\n"]
    assert qwen.prompts[2:] == [
        f"{closed}user\nGo on<|im_end|>\n<|im_start|>assistant\n",
        f"{CHATTED}<|im_end|>\n<|im_start|>assistant\n",
    ]


async def test_negative_limit_is_none(qwen: Model) -> None:
    qwen.says = ["Hi", "Hi"]
    answers = [(await sent(qwen, max_output_tokens=limit)).json() for limit in (-1, None)]
    assert [answer["max_output_tokens"] for answer in answers] == [None, None]
    assert len({one.sampling.max_tokens for one in qwen.pool.submitted}) == 1


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"input": None}, 400, "input"), ({"input": ""}, 400, "input"), ({"input": []}, 400, "input"),
    ({"input": 5}, 400, "input"), ({"input": [5]}, 400, "input[0]"),
    ({"input": [{"content": "a"}]}, 400, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 400, "input[0].type"),
    ({"input": [{"role": "tool", "content": "a"}]}, 400, "input[0].role"),
    ({"input": user({"type": "input_image", "image_url": "http://a"})}, 400, "input[0].content[0]"),
    ({"input": user({"type": "input_file", "file_id": "a"})}, 400, "input[0].content[0].type"),
    ({"input": [CALLED]}, 400, "input"), ({"input": [{**CALLED, "type": "function_call_output", "output": "a"}]}, 400,
     "input"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": "a"}]}, 400, "input"),
    ({"input": "a" * 9000}, 400, "input"),
    ({"previous_response_id": "resp_1"}, 400, "previous_response_id"), ({"conversation": "c"}, 400, "conversation"),
    ({"previous_input_messages": [{"role": "user", "content": "a"}]}, 400, "previous_input_messages"),
    ({"enable_response_messages": True}, 400, "enable_response_messages"),
    ({"input": [{"role": "user", "content": []}]}, 400, "input[0].content"),
    ({"background": True}, 400, "background"), ({"prompt": {"id": "a"}}, 400, "prompt"),
    ({"truncation": "left"}, 400, "truncation"), ({"truncation": "auto", "input": "a" * 9000}, 400, "input"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"), ({"include": ["all"]}, 400, "include[0]"),
    ({"top_logprobs": 21}, 400, "top_logprobs"), ({"text": {"verbosity": "none"}}, 400, "text.verbosity"),
    ({"image": {"context_compression": "enabled"}}, 400, "image"),
    ({"access_programs": {"cyber": "daybreak_red"}}, 400, "access_programs"),
    ({"prompt_cache_options": {"prewarm": True}}, 400, "prompt_cache_options.prewarm"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, 400, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "strict": True, "schema": {"type": "strin"}}}}, 400,
     "text.format.schema.type"),
    ({"reasoning": {"effort": "much"}}, 400, "reasoning.effort"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, 400, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools[0].name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "no"}}, 400, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, 400, "tool_choice.type"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "status", "param"), REFUSED)
async def test_response_refusal_names_the_field(qwen: Model, more: dict[str, Any], status: int, param: str) -> None:
    answer = await sent(qwen, **more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert not qwen.pool.submitted


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": CALLED["call_id"], "output": "b" * 1500}
LONG: list[Any] = [
    said("developer", "Be brief."), said("user", "1" + "a" * 4000), said("assistant", "2" + "a" * 2000),
    said("user", "3" + "a" * 1000), CALLED, RESULT, said("assistant", "4"), said("user", "5"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("room", "dropped"),
    [(None, 1), (500, 1), (4096, 2), (100, 0)],
    ids=["a-quarter", "asked", "half-at-most", "fits"],
)
async def test_conversation_that_is_too_long_loses_its_first_items(qwen: Model, room: int | None, dropped: int) -> None:
    qwen.says = ["Hi", "Hi"]
    items = LONG if dropped else LONG[:1] + LONG[2:]
    answer = await post(qwen, input=items, max_output_tokens=room, truncation="auto", tools=TOOLS)
    assert (answer["truncation"], answer["status"]) == ("auto", "completed"), answer
    kept = LONG[:1] + LONG[1 + dropped :] if dropped else items
    await post(qwen, input=kept, max_output_tokens=room, tools=TOOLS)
    assert qwen.pool.submitted[0].prompt == qwen.pool.submitted[1].prompt


async def test_result_is_not_shown_without_its_call(qwen: Model) -> None:
    qwen.says = ["Hi", "Hi"]
    items = [said("user", "a" * 7000), CALLED, RESULT]
    await post(qwen, input=items, truncation="auto", tools=TOOLS)
    await post(qwen, input=items[1:], tools=TOOLS)
    assert qwen.pool.submitted[0].prompt == qwen.pool.submitted[1].prompt


UNUSED: list[Any] = [
    {"type": "web_search", "external_web_access": True, "search_content_types": ["text", "image"]},
    {"type": "local_shell"}, {"type": "image_generation", "output_format": "png"},
    {"type": "namespace", "name": "agents", "description": "", "tools": [{"type": "function", "name": "spawn"}]},
    {"type": "tool_search", "execution": "client", "description": "", "parameters": {"type": "object"}},
]  # fmt: skip


@pytest.mark.parametrize("only", UNUSED, ids=lambda tool: tool["type"])
async def test_tool_of_openais_models_has_no_effect(qwen: Model, only: Any) -> None:
    qwen.says = ["Hi."] * 3
    alone, none = await sent(qwen, tools=[only]), await sent(qwen)
    beside = await sent(qwen, tools=[only, *TOOLS, only])
    assert "X-Sluice-Ignored-Fields" not in beside.headers
    assert [one.json()["tools"] for one in (alone, none)] == [[], []] and qwen.prompts[0] == qwen.prompts[1]
    assert [tool["name"] for tool in beside.json()["tools"]] == ["get_weather", "now"]
    assert only.get("name", "local_shell") not in qwen.prompts[2]


async def test_tool_of_openais_models_cannot_be_forced_and_counts_as_one(qwen: Model) -> None:
    forced: list[Any] = [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "name": "apply_patch"}}]
    answers = [await sent(qwen, tools=UNUSED, **more) for more in forced]
    named = [(answer.status_code, answer.json()["error"]["param"]) for answer in answers]
    assert named == [(400, "tool_choice")] * 2
    many = await sent(qwen, tools=UNUSED * 26)
    assert (many.status_code, many.json()["error"]["param"]) == (400, "tools")
    parameters = {"properties": {"a": {"type": "strin"}}}
    broken = [*UNUSED, {"type": "function", "name": "f", "strict": True, "parameters": parameters}]
    assert (await post(qwen, tools=broken))["error"]["param"] == f"tools[{len(UNUSED)}].parameters.properties.a.type"


async def test_forced_call_with_a_text_format_has_the_grammar_of_the_call(qwen: Model) -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "integer"}}}
    qwen.says = ["Hi."] * 2
    for more in ({}, {"text": form}):
        await post(qwen, tools=TOOLS, tool_choice="required", **more)
    plain, formed = qwen.grammars
    assert plain == formed and "get_weather" in plain


async def test_functions_that_may_not_be_called_are_neither_shown_nor_counted(qwen: Model) -> None:
    qwen.says = ["Hi."]
    answer = await post(qwen, tools=TOOLS, tool_choice="none")
    assert qwen.prompts == [CHATTED] and len(answer["tools"]) == 2
    async with http_client(qwen.pool, qwen.tokenizer) as http:
        body = {key: ASKED[key] for key in ("model", "input")} | {"tools": TOOLS, "tool_choice": "none"}
        counted = (await http.post("/v1/responses/input_tokens", json=body)).json()["input_tokens"]
        chat = {"messages": [{"role": "user", "content": "Weather?"}], "tools": CHAT_TOOLS, "tool_choice": "none"}
        tokens = (await http.post("/tokenize", json=chat)).json()["count"]
        shown = (await http.post("/apply-template", json=chat)).json()["prompt"]
    assert answer["usage"]["input_tokens"] == counted == tokens and shown == CHATTED


async def test_refusal_by_the_model_names_the_field(folder: Path) -> None:
    plain = Model(tokenizer_with(folder / "plain", "{{ raise_exception('no') if messages | length > 1 }}a"))
    assert (await post(plain, instructions="be brief"))["error"]["param"] == "input"


async def test_count_tokens_equals_the_input_tokens_of_a_response(qwen: Model) -> None:
    qwen.says = ["Hi."]
    more: dict[str, Any] = {"model": MODEL, "input": "Hi", "instructions": "Be brief.", "tools": TOOLS}
    async with qwen.served() as url, openai_sdk(url) as sdk:
        counted = await sdk.responses.input_tokens.count(**more)
        asked = await sdk.responses.create(**more)
    assert asked.usage and counted.input_tokens == asked.usage.input_tokens > 10
