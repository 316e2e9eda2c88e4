"""Tools and thoughts in both dialects: the official SDKs and bare HTTP against the app, and a model with a script."""

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from shared.messages import Outcome
from tests.fakes import MODEL
from tests.frontend.speaking import Model, tokenizer_with
from tests.frontend.test_protocols_messages import parse_events
from tests.frontend.test_protocols_streams import parse_sse
from tests.templates import LLAMA3, QWEN3

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
CLAUDES: list[Any] = [
    {"name": "get_weather", "description": "Of a city.", "input_schema": CITY},
    {"name": "now", "input_schema": {"type": "object"}},
]
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 500}
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SAID = f"<think>\nHm.\n</think>\n\nI look.\n{WEATHER}\n{NOW}"
LLAMAS = '{"name": "get_weather", "parameters": {"city": "Paris"}}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture
def qwen(folder: Path) -> Model:
    return Model(tokenizer_with(folder / "qwen", QWEN3))


@pytest.fixture
def llama(folder: Path) -> Model:
    return Model(tokenizer_with(folder / "llama", LLAMA3))


def chat(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def claude(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)


# OpenAI


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    *events, done = parse_sse(answer.text)
    assert done == "[DONE]"
    return events


async def whole_or_streamed(sdk: openai.AsyncOpenAI, streamed: bool, **fields: Any) -> Any:
    if not streamed:
        return (await sdk.chat.completions.create(**fields)).choices[0]
    async with sdk.chat.completions.stream(**fields) as stream:
        async for _ in stream:
            pass
        return (await stream.get_final_completion()).choices[0]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_loop_of_calls_and_results(qwen: Model, streamed: bool) -> None:
    qwen.says = [SAID, "<think>\nGood.\n</think>\n\nSunny."]
    async with qwen.served() as url, chat(url) as sdk:
        first = await whole_or_streamed(sdk, streamed, **ASKED, tools=TOOLS)
        message = first.message
        assert (first.finish_reason, message.content, message.reasoning_content) == ("tool_calls", "I look.", "Hm.")
        told = [(call.type, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
        assert told == [("function", "get_weather", {"city": "Paris"}), ("function", "now", {})]
        ids = [call.id for call in message.tool_calls]
        assert len(set(ids)) == 2 and all(id.startswith("call_") for id in ids)
        results = [
            {"role": "tool", "tool_call_id": id, "content": said} for id, said in zip(ids, ("20°", "noon"), strict=True)
        ]
        messages = [*ASKED["messages"], message, *results]
        second = await whole_or_streamed(sdk, streamed, **{**ASKED, "messages": messages}, tools=TOOLS)
    assert (second.finish_reason, second.message.content, second.message.tool_calls) == ("stop", "Sunny.", None)
    assert qwen.prompts[1].partition("Weather?<|im_end|>\n")[2] == (
        f"<|im_start|>assistant\n{SAID}<|im_end|>\n<|im_start|>user\n<tool_response>\n20°\n</tool_response>"
        "\n<tool_response>\nnoon\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("streamed", [False, True])
async def test_llamas_calls_and_results(llama: Model, streamed: bool) -> None:
    llama.says = [LLAMAS, "Sunny."]
    async with llama.served() as url, chat(url) as sdk:
        first = await whole_or_streamed(sdk, streamed, **ASKED, tools=TOOLS)
        assert (first.finish_reason, first.message.content) == ("tool_calls", None)
        (call,) = first.message.tool_calls
        twice = [{"id": id, "type": "function", "function": {"name": "now", "arguments": "{}"}} for id in "ab"]
        messages = [
            *ASKED["messages"],
            first.message,
            {"role": "tool", "tool_call_id": call.id, "content": "20°"},
            {"role": "assistant", "content": None, "tool_calls": twice},
            {"role": "tool", "tool_call_id": "b", "content": "B"},
            {"role": "tool", "tool_call_id": "a", "content": "A"},
        ]
        second = await whole_or_streamed(sdk, streamed, **{**ASKED, "messages": messages}, tools=TOOLS)
    assert (second.finish_reason, second.message.content) == ("stop", "Sunny.")
    head, end = "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"
    now = head.format("assistant") + '{"name": "now", "parameters": {}}' + end
    shown = [head.format("ipython") + f'"{said}"{end}' for said in ("20°", "A", "B")]
    assert qwen_free(llama.prompts[1]) == (
        head.format("assistant") + LLAMAS + end + shown[0] + now + shown[1] + now + shown[2] + head.format("assistant")
    )


def qwen_free(prompt: str) -> str:
    return prompt.partition("Weather?<|eot_id|>")[2]


async def test_the_stream_is_openais(qwen: Model) -> None:
    qwen.says, qwen.size = [SAID], 40
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/chat/completions", json=ASKED | {"tools": TOOLS, "stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    choices = [event["choices"][0] for event in chunks(answer)]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": None, "refusal": None} and deltas[-1] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    id = calls[0].pop("id")
    assert calls[0] == {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    assert id.startswith("call_") and all(set(call) == {"index", "function"} for call in calls if "type" not in call)
    assert "".join(call["function"]["arguments"] for call in calls if call["index"] == 0) == '{"city": "Paris"}'
    thoughts = [delta for delta in deltas if "reasoning" in delta]
    assert all(
        delta == {"reasoning": delta["reasoning"], "reasoning_content": delta["reasoning"]} for delta in thoughts
    )


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_choice_scores_and_usage_go_with_calls(qwen: Model, streamed: bool) -> None:
    qwen.says = [SAID, "Hi.", ""]
    tokens = len(qwen.tokenizer.encode_now([SAID], False)[0])
    extra = {"logprobs": True, "top_logprobs": 1, "n": 3, "tools": TOOLS, "stream_options": {"include_usage": True}}
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/chat/completions", json=ASKED | extra | {"stream": streamed, "timings": True})
    folded = folds(chunks(answer)) if streamed else folds([answer.json()])
    assert folded == [
        ("I look.", ["get_weather", "now"], tokens, "tool_calls"), ("Hi.", [], 3, "stop"), ("", [], 0, "stop"),
    ]  # fmt: skip
    last = chunks(answer)[-1] if streamed else answer.json()
    assert last["usage"]["completion_tokens"] == tokens + 3 and "queue_ms" in last["timings"]


def folds(events: list[dict[str, Any]]) -> list[tuple[str, list[str], int, str]]:
    """Of each choice: its text, what it called, how many of its tokens were scored, how it ended."""
    found: list[tuple[str, list[str], int, str]] = [("", [], 0, "")] * 3
    for choice in [choice for event in events for choice in event["choices"]]:
        said = choice.get("delta") or choice.get("message") or {}
        text, names, scores, finish = found[choice["index"]]
        new = [call["function"]["name"] for call in said.get("tool_calls", ()) if "id" in call]
        scored = len((choice["logprobs"] or {"content": ()})["content"])
        found[choice["index"]] = (
            text + (said.get("content") or ""), names + new, scores + scored, choice["finish_reason"] or finish,
        )  # fmt: skip
    return found


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("stop", "outcome", "finish"), [("Par", Outcome.EOS, "stop"), (None, Outcome.LENGTH, "length")]
)
async def test_a_call_that_is_cut_off_is_no_reason_to_act(
    qwen: Model, streamed: bool, stop: str | None, outcome: Outcome, finish: str
) -> None:
    qwen.says, qwen.outcome = [f"{NOW}\n" + WEATHER[: WEATHER.index("is")]], outcome
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post(
            "/v1/chat/completions", json=ASKED | {"tools": TOOLS, "stop": stop, "stream": streamed}
        )
    events = chunks(answer) if streamed else [answer.json()]
    assert events[-1]["choices"][0]["finish_reason"] == finish
    calls = [call for event in events for call in event["choices"][0].get("delta", event["choices"][0].get("message"))
             .get("tool_calls", ()) if call.get("index", 1) == 1]  # fmt: skip
    text = "".join(call["function"]["arguments"] for call in calls).removeprefix("{}")
    assert text == ('{"city": "' if stop else '{"city": "Par')


# Anthropic

THINK: dict[str, Any] = {"type": "enabled", "budget_tokens": 1024}


async def claude_says(sdk: anthropic.AsyncAnthropic, streamed: bool, **fields: Any) -> anthropic.types.Message:
    if not streamed:
        return await sdk.messages.create(**fields)
    async with sdk.messages.stream(**fields) as stream:
        return await stream.get_final_message()


@pytest.mark.parametrize("streamed", [False, True])
async def test_claudes_loop_of_calls_and_results(qwen: Model, streamed: bool) -> None:
    qwen.says = [SAID, "Sunny."]
    asked: dict[str, Any] = {**ASKED, "tools": CLAUDES, "thinking": THINK}
    async with qwen.served() as url, claude(url) as sdk:
        first = await claude_says(sdk, streamed, **asked)
        thought, text, weather, now = first.content
        assert first.stop_reason == "tool_use" and (thought.type, text.type) == ("thinking", "text")
        assert (thought.thinking, bool(thought.signature), text.text) == ("Hm.", True, "I look.")  # type: ignore[union-attr]
        assert (weather.type, weather.name, weather.input) == ("tool_use", "get_weather", {"city": "Paris"})  # type: ignore[union-attr]
        assert (now.name, now.input, now.id != weather.id) == ("now", {}, True)  # type: ignore[union-attr]
        results = [
            {"type": "tool_result", "tool_use_id": weather.id, "content": "no such city", "is_error": True},  # type: ignore[union-attr]
            {"type": "tool_result", "tool_use_id": now.id, "content": [{"type": "text", "text": "noon"}]},  # type: ignore[union-attr]
            {"type": "text", "text": "Well?"},
        ]
        said = [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        second = await claude_says(sdk, streamed, **{**asked, "messages": [*asked["messages"], *said]})
    (answer,) = second.content
    assert (second.stop_reason, answer.type, answer.text) == ("end_turn", "text", "Sunny.")  # type: ignore[union-attr]
    assert qwen.prompts[1].partition("Weather?<|im_end|>\n")[2] == (
        f"<|im_start|>assistant\nI look.\n{WEATHER}\n{NOW}<|im_end|>\n<|im_start|>user\n<tool_response>\n"
        "Error: no such city\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_the_stream_is_anthropics(qwen: Model) -> None:
    qwen.says, qwen.size = [SAID], 500
    body = ASKED | {"tools": CLAUDES, "thinking": THINK, "stream": True}
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/messages", json=body)
    told = [(data["type"], data.get("index"), (data.get("content_block") or data.get("delta") or {}).get("type"))
            for data in parse_events(answer.text)]  # fmt: skip
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert told == [
        ("message_start", None, None), ("ping", None, None),
        (start, 0, "thinking"), (delta, 0, "thinking_delta"), (delta, 0, "signature_delta"), (stop, 0, None),
        (start, 1, "text"), (delta, 1, "text_delta"), (stop, 1, None),
        (start, 2, "tool_use"), (delta, 2, "input_json_delta"), (stop, 2, None),
        (start, 3, "tool_use"), (delta, 3, "input_json_delta"), (stop, 3, None),
        ("message_delta", None, None), ("message_stop", None, None),
    ]  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_was_cut_off_is_closed_for_claude(llama: Model, streamed: bool) -> None:
    llama.says, llama.outcome = [LLAMAS[:-4].replace('"city"', '"days": 3, "city"')], Outcome.LENGTH
    async with llama.served() as url, claude(url) as sdk:
        message = await claude_says(sdk, streamed, **ASKED, tools=CLAUDES)
    (call,) = message.content
    assert (message.stop_reason, call.input) == ("max_tokens", {"days": 3})  # type: ignore[union-attr]


async def test_thoughts_are_told_when_they_are_asked_for(qwen: Model) -> None:
    """Where nothing is asked for, nothing is looked for either."""
    off, thought = "<think>\n\n</think>\n\n", "<think>a</think>b"
    qwen.says = ["Hi.", "Hi.", thought, thought, thought, "Hi.", "<think>a"]
    async with qwen.served() as url, claude(url) as sdk, chat(url) as other:
        plain = await sdk.messages.create(**ASKED)
        disabled = await sdk.messages.create(**ASKED, thinking={"type": "disabled"})
        adaptive = await sdk.messages.create(**ASKED, thinking={"type": "adaptive"})
        hidden = await sdk.messages.create(**ASKED, thinking={**THINK, "display": "omitted"})
        chatted = await other.chat.completions.create(**ASKED, reasoning_effort="high")
        await other.chat.completions.create(**ASKED, reasoning_effort="minimal")
        lost = await sdk.messages.create(**ASKED, thinking=THINK)
    assert [prompt.endswith(off) for prompt in qwen.prompts] == [True, True, False, False, False, True, False]
    assert [block.type for block in plain.content + disabled.content + adaptive.content] == [
        "text", "text", "thinking", "text",
    ]  # fmt: skip
    assert hidden.content[0].type == "thinking" and hidden.content[0].thinking == ""
    assert chatted.choices[0].message.content == "b"
    assert chatted.choices[0].message.model_extra == {"reasoning_content": "a", "reasoning": "a"}
    assert [block.type for block in lost.content] == ["thinking"]


# what the worker is asked for


async def test_choices_of_tools_become_grammars(qwen: Model) -> None:
    names = [None, "auto", "required", "none", {"type": "function", "function": {"name": "now"}},
             {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
                 {"type": "function", "function": {"name": "now"}}]}}]  # fmt: skip
    qwen.says = [NOW] * len(names)
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        answers = [
            await http.post("/v1/chat/completions", json=ASKED | {"tools": TOOLS, "tool_choice": name})
            for name in names
        ]
    ends = [answer.json()["choices"][0]["finish_reason"] for answer in answers]
    assert ends == ["tool_calls"] * 3 + ["stop"] + ["tool_calls"] * 2
    auto, same, required, none, one, allowed = qwen.grammars
    assert auto == same and "get_weather" in required and one == allowed and "get_weather" not in one
    assert "calls" in required and "%json" not in none and len(set(qwen.grammars)) == 4
    assert all("<tools>" in prompt for prompt in qwen.prompts)


async def test_a_form_may_go_with_tools_and_follows_a_thought(qwen: Model) -> None:
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
    ({"tools": function(name="a b")}, 422, "tools[0].function.name"),
    ({"tools": [*TOOLS, TOOLS[0]]}, 422, "tools"), ({"tools": [{"type": "custom"}]}, 422, "tools[0].type"),
    ({"tools": function(parameters={"type": "array"})}, 422, "tools[0].function.parameters.type"),
    ({"tools": TOOLS + function(parameters={"properties": {"a": {"type": "strin"}}})}, 422,
     "tools[2].function.parameters"),
    ({"tools": function(parameters={"properties": {"a": {"not": {}}}}, strict=True)}, 422,
     "tools[0].function.parameters"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, 422, "tool_choice"),
    ({"tool_choice": "required"}, 422, "tool_choice"), ({"tools": TOOLS, "tool_choice": "any"}, 422, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, 400, "parallel_tool_calls"),
    ({"reasoning_effort": "much"}, 422, "reasoning_effort"),
    ({"messages": [*ASKED["messages"], LOOKED]}, 422, "messages"),
    ({"messages": [{"role": "tool", "tool_call_id": "1", "content": "x"}]}, 422, "messages"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{**LOOKED, "role": "user", "content": "x"}]}, 422, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, 400, "messages[0].tool_calls[0].function"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "status", "param"), REFUSED)
async def test_refusals_name_the_field(qwen: Model, more: dict[str, Any], status: int, param: str) -> None:
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/chat/completions", json=ASKED | more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert not qwen.link.submitted


CLAUDE_REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"tools": [{"name": "f"}]}, 400, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 422, "tools[0].type"),
    ({"tools": CLAUDES, "tool_choice": {"type": "tool"}}, 400, "tool_choice.name"),
    ({"tools": CLAUDES, "tool_choice": {"type": "tool", "name": "no"}}, 422, "tool_choice"),
    ({"thinking": {"type": "much"}}, 422, "thinking.type"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, 422,
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}, 422, "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "status", "param"), CLAUDE_REFUSED)
async def test_claudes_refusals_name_the_field(qwen: Model, more: dict[str, Any], status: int, param: str) -> None:
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/messages", json=ASKED | more)
    assert answer.status_code == status and f"`{param}" in answer.json()["error"]["message"], answer.text


async def test_a_model_without_tools_or_thoughts_says_so(folder: Path) -> None:
    plain = Model(tokenizer_with(folder / "plain", "{% for m in messages %}{{ m.content }}{% endfor %}"), ["Hi."] * 3)
    async with plain.served() as url, httpx.AsyncClient(base_url=url) as http:

        async def refused(path: str, **more: Any) -> str:
            answer = await http.post(path, json=ASKED | more)
            assert answer.status_code == 422
            return str(answer.json()["error"]["message"])

        assert "its chat template has no place for them" in await refused("/v1/chat/completions", tools=TOOLS)
        assert "its chat template has no place for them" in await refused("/v1/messages", tools=CLAUDES)
        assert "does not think" in await refused("/v1/chat/completions", reasoning_effort="low")
        assert "does not think" in await refused("/v1/messages", thinking=THINK)
        for path, more in (("chat/completions", {"reasoning_effort": "none", "tools": []}),
                           ("messages", {"thinking": {"type": "disabled"}})):  # fmt: skip
            assert (await http.post(f"/v1/{path}", json=ASKED | more)).status_code == 200


async def test_flags_overrule_what_the_template_says(qwen: Model) -> None:
    qwen.says = [SAID]
    async with qwen.served(tool_format="none", reasoning_format="none") as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/chat/completions", json=ASKED)
        assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": SAID, "refusal": None}
        refused = await http.post("/v1/chat/completions", json=ASKED | {"tools": TOOLS})
    assert refused.status_code == 422 and "--tool-format" in refused.text


async def test_counting_sees_the_tools(qwen: Model) -> None:
    qwen.says = ["Hi."] * 2
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        body = {"model": MODEL, "messages": ASKED["messages"]}
        counted = (await http.post("/v1/messages/count_tokens", json=body | {"tools": CLAUDES})).json()["input_tokens"]
        asked = await http.post("/v1/messages", json=ASKED | {"tools": CLAUDES})
        assert asked.json()["usage"]["input_tokens"] == counted
        tokens = (await http.post("/tokenize", json=body | {"tools": TOOLS})).json()["count"]
        chatted = await http.post("/v1/chat/completions", json=ASKED | {"tools": TOOLS})
    assert chatted.json()["usage"]["prompt_tokens"] == tokens
