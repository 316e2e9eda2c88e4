"""Reasoning and tool calls in Anthropic's messages: the official SDK and bare HTTP against the app."""

from typing import Any

import anthropic
import httpx
import pytest

from shared.messages import Outcome
from tests.fakes import MODEL
from tests.frontend.api.harness import parse_events
from tests.frontend.api.scripted import (
    ANSWERED,
    CALLED,
    CITY,
    HISTORY,
    LLAMAS,
    NOW,
    SAID,
    WEATHER,
    anthropic_sdk,
    openai_sdk,
)
from tests.frontend.speaking import Model

CLAUDES: list[Any] = [
    {"name": "get_weather", "description": "Of a city.", "input_schema": CITY},
    {"name": "now", "input_schema": {"type": "object"}},
]


ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 500}


THINK: dict[str, Any] = {"type": "enabled", "budget_tokens": 1024}


async def claude_says(sdk: anthropic.AsyncAnthropic, streamed: bool, **fields: Any) -> anthropic.types.Message:
    if not streamed:
        return await sdk.messages.create(**fields)
    async with sdk.messages.stream(**fields) as stream:
        return await stream.get_final_message()


@pytest.mark.parametrize("streamed", [False, True])
async def test_message_loop_of_calls_and_results(qwen: Model, streamed: bool) -> None:
    qwen.says = [SAID, "Sunny."]
    asked: dict[str, Any] = {**ASKED, "tools": CLAUDES, "thinking": THINK}
    async with qwen.served() as url, anthropic_sdk(url) as sdk:
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


async def test_message_stream_of_calls_has_anthropics_events(qwen: Model) -> None:
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
async def test_message_cut_off_has_closed_blocks(llama: Model, streamed: bool) -> None:
    llama.says, llama.outcome = [LLAMAS[:-4].replace('"city"', '"days": 3, "city"')], Outcome.LENGTH
    async with llama.served() as url, anthropic_sdk(url) as sdk:
        message = await claude_says(sdk, streamed, **ASKED, tools=CLAUDES)
    (call,) = message.content
    assert (message.stop_reason, call.input) == ("max_tokens", {"days": 3})  # type: ignore[union-attr]


async def test_thinking_is_sent_if_requested(qwen: Model) -> None:
    """If a request does not ask for thinking, the prompt ends with an empty thought, and the answer has no thinking."""
    off, thought = "<think>\n\n</think>\n\n", "<think>a</think>b"
    qwen.says = ["Hi.", "Hi.", thought, thought, thought, "Hi.", "<think>a"]
    async with qwen.served() as url, anthropic_sdk(url) as sdk, openai_sdk(url) as other:
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


@pytest.mark.parametrize("streamed", [False, True])
async def test_message_loop_in_channels(gpt_oss: Model, streamed: bool) -> None:
    gpt_oss.says = [CALLED, ANSWERED]
    asked: dict[str, Any] = {**ASKED, "tools": CLAUDES, "thinking": THINK, "output_config": {"effort": "max"}}
    async with gpt_oss.served() as url, anthropic_sdk(url) as sdk:
        first = await claude_says(sdk, streamed, **asked)
        thought, text, call = first.content
        assert (thought.thinking, text.text, first.stop_reason) == ("Hm.", "I look.", "tool_use")  # type: ignore[union-attr]
        assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})  # type: ignore[union-attr]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "20°"}  # type: ignore[union-attr]
        said = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await claude_says(sdk, streamed, **{**asked, "messages": [*asked["messages"], *said]})
    assert [block.type for block in second.content] == ["thinking", "text"] and second.stop_reason == "end_turn"
    assert second.content[-1].text == "Sunny."  # type: ignore[union-attr]
    assert "\nReasoning: high\n" in gpt_oss.prompts[0] and gpt_oss.prompts[1].endswith(HISTORY)
