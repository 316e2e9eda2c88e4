"""Tools and tool choices in both chat formats: grammars, refusals, flags."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import MODEL
from tests.frontend.api.scripted import CITY, NOW, SAID, WEATHER
from tests.frontend.speaking import Model, tokenizer_with

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]


CLAUDES: list[Any] = [
    {"name": "get_weather", "description": "Of a city.", "input_schema": CITY},
    {"name": "now", "input_schema": {"type": "object"}},
]


ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 500}


THINK: dict[str, Any] = {"type": "enabled", "budget_tokens": 1024}


async def test_tool_choice_becomes_a_grammar(qwen: Model) -> None:
    allowed: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "now"}}]}}  # fmt: skip
    names = [None, "auto", "required", "none", {"type": "function", "function": {"name": "now"}}, allowed]
    choices = [{"tool_choice": name} for name in names] + [{"tool_choice": allowed, "parallel_tool_calls": False}]
    qwen.says = [NOW] * len(choices)
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        answers = [
            await http.post("/v1/chat/completions", json=ASKED | {"tools": TOOLS, **choice}) for choice in choices
        ]
    ends = [answer.json()["choices"][0]["finish_reason"] for answer in answers]
    assert ends == ["tool_calls"] * 3 + ["stop"] + ["tool_calls"] * 3
    auto, same, required, none, named, several, single = qwen.grammars
    assert auto == same and "get_weather" in required and "get_weather" not in named
    assert named == single != several, "a named function is called once"
    assert "calls" in required and "%json" not in none and len(set(qwen.grammars)) == 5
    shown = ["<tools>" in prompt for prompt in qwen.prompts]
    assert shown == [choice["tool_choice"] != "none" for choice in choices]


async def test_choice_without_tools_has_no_effect(qwen: Model) -> None:
    choices: list[dict[str, Any]] = [{}, {"tool_choice": "auto", "tools": []}, {"tool_choice": "required"}]
    qwen.says = [SAID] * len(choices)
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        for choice in choices:
            answer = await http.post("/v1/chat/completions", json=ASKED | choice)
            assert answer.json()["choices"][0]["finish_reason"] == "stop", answer.text
    assert {*qwen.grammars} == {""} and len({*qwen.prompts}) == 1


async def test_structured_output_with_tools_follows_reasoning(qwen: Model) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    qwen.says = ["<think>\n</think>\n\n7", "7", WEATHER]
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        bodies = [{}, {"reasoning_effort": "none"}, {"tools": TOOLS}]
        answers = [
            await http.post("/v1/chat/completions", json=ASKED | {"response_format": form} | more) for more in bodies
        ]
    contents = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert contents == ["7", "7", None]
    after, alone, either = qwen.grammars
    assert "think" in after and "@answer" in after and "lark" not in alone and "(calls | @answer)" in either


def function(**more: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **more}}]


LOOKED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "now", "arguments": "{}"}}]}


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"tools": {}}, 400, "tools"), ({"tools": function(parameters=[])}, 400, "tools[0].function.parameters"),
    ({"tools": function(name="a b")}, 400, "tools[0].function.name"),
    ({"tools": [*TOOLS, TOOLS[0]]}, 400, "tools"), ({"tools": [{"type": "custom"}]}, 400, "tools[0].custom"),
    ({"tools": function(parameters={"type": "array"})}, 400, "tools[0].function.parameters.type"),
    ({"tools": TOOLS + function(parameters={"properties": {"a": {"type": "strin"}}}, strict=True)}, 400,
     "tools[2].function.parameters.properties.a.type"),
    ({"tools": function(parameters={"properties": {"a": {"enum": []}}, "required": ["a"]})}, 400,
     "tools[0].function.parameters.properties.a.enum"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, 400, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, 400, "tool_choice"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"tools": TOOLS, "tool_choice": "any"}, 400, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, 400, "parallel_tool_calls"),
    ({"reasoning_effort": "much"}, 400, "reasoning_effort"),
    ({"messages": [*ASKED["messages"], LOOKED]}, 400, "messages"),
    ({"messages": [{"role": "tool", "tool_call_id": "1", "content": "x"}]}, 400, "messages"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{**LOOKED, "role": "user", "content": "x"}]}, 400, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, 400, "messages[0].tool_calls[0].function"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "status", "param"), REFUSED)
async def test_openai_tool_refusal_names_the_field(qwen: Model, more: dict[str, Any], status: int, param: str) -> None:
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/chat/completions", json=ASKED | more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert not qwen.pool.submitted


CLAUDE_REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"tools": [{"name": "f"}]}, 400, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "tools[0].type"),
    ({"tools": CLAUDES, "tool_choice": {"type": "tool"}}, 400, "tool_choice.name"),
    ({"tools": CLAUDES, "tool_choice": {"type": "tool", "name": "no"}}, 400, "tool_choice"),
    ({"thinking": {"type": "much"}}, 400, "thinking.type"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, 400,
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}, 400, "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "status", "param"), CLAUDE_REFUSED)
async def test_anthropic_tool_refusal_names_its_field(
    qwen: Model, more: dict[str, Any], status: int, param: str
) -> None:
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/messages", json=ASKED | more)
    assert answer.status_code == status and f"`{param}" in answer.json()["error"]["message"], answer.text


async def test_model_without_reasoning_answers_whatever_effort_is_asked(folder: Path) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"reasoning_effort": "low"}), ("chat/completions", {"reasoning_effort": "none"}),
        ("messages", {"thinking": THINK}), ("messages", {"thinking": {"type": "disabled"}}), ("messages", {}),
    ]  # fmt: skip
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    plain = Model(tokenizer_with(folder / "plain", template), ["Hi."] * len(asked))
    async with plain.served() as url, httpx.AsyncClient(base_url=url) as http:
        for path, more in asked:
            answer = await http.post(f"/v1/{path}", json=ASKED | more)
            assert answer.status_code == 200 and "Hi." in answer.text


async def test_tool_and_reasoning_format_flags_override_the_template(qwen: Model) -> None:
    qwen.says = [SAID]
    async with qwen.served(tool_format="none", reasoning_format="none") as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/chat/completions", json=ASKED)
        assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": SAID, "refusal": None}
        refused = await http.post("/v1/chat/completions", json=ASKED | {"tools": TOOLS})
    assert refused.status_code == 400 and "--tool-format" in refused.text


async def test_token_count_includes_the_tools(qwen: Model) -> None:
    qwen.says = ["Hi."] * 2
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        body = {"model": MODEL, "messages": ASKED["messages"]}
        counted = (await http.post("/v1/messages/count_tokens", json=body | {"tools": CLAUDES})).json()["input_tokens"]
        asked = await http.post("/v1/messages", json=ASKED | {"tools": CLAUDES})
        assert asked.json()["usage"]["input_tokens"] == counted
        tokens = (await http.post("/tokenize", json=body | {"tools": TOOLS})).json()["count"]
        chatted = await http.post("/v1/chat/completions", json=ASKED | {"tools": TOOLS})
    assert chatted.json()["usage"]["prompt_tokens"] == tokens
