"""Reasoning and tool calls in chat completions: the official SDK and bare HTTP against the app."""

import json
from typing import Any

import httpx
import openai
import pytest

from shared.messages import Outcome
from tests.fakes import MODEL
from tests.frontend.api.harness import (
    parse_sse,
)
from tests.frontend.api.scripted import (
    ANSWERED,
    CALLED,
    CITY,
    HISTORY,
    LLAMAS,
    NOW,
    SAID,
    WEATHER,
    openai_sdk,
)
from tests.frontend.speaking import Model

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]


ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 500}


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


async def test_request_has_its_reasoning_streamed_in_one_piece(qwen: Model) -> None:
    thoughts = []
    for in_pieces in (True, False):
        qwen.says = ["<think>\nHm, let me see.\n</think>\n\nSunny."]
        async with qwen.served() as url, httpx.AsyncClient() as http:
            body = ASKED | {"stream": True, "stream_reasoning": in_pieces}
            sent = chunks(await http.post(f"{url}/v1/chat/completions", json=body))
        deltas = [choice["delta"] for chunk in sent for choice in chunk["choices"]]
        thoughts.append([delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta])
    assert len(thoughts[0]) > 1 and thoughts[1] == ["".join(thoughts[0])]


@pytest.mark.parametrize("streamed", [False, True])
async def test_chat_loop_of_calls_and_results(qwen: Model, streamed: bool) -> None:
    qwen.says = [SAID, "<think>\nGood.\n</think>\n\nSunny."]
    async with qwen.served() as url, openai_sdk(url) as sdk:
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
async def test_chat_loop_of_llama_calls_and_results(llama: Model, streamed: bool) -> None:
    llama.says = [LLAMAS, "Sunny."]
    async with llama.served() as url, openai_sdk(url) as sdk:
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


async def test_chat_stream_of_calls_has_openais_chunks(qwen: Model) -> None:
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
async def test_chat_calls_with_choices_logprobs_and_usage(qwen: Model, streamed: bool) -> None:
    qwen.says = [SAID, "Hi.", ""]
    tokens = len(qwen.tokenizer.encode_now([SAID], False)[0])
    extra = {"logprobs": True, "top_logprobs": 1, "n": 3, "tools": TOOLS}
    extra |= {"stream_options": {"include_usage": True}} if streamed else {}
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/chat/completions", json=ASKED | extra | {"stream": streamed, "timings": True})
    folded = folds(chunks(answer)) if streamed else folds([answer.json()])
    assert folded == [
        ("I look.", ["get_weather", "now"], tokens, "tool_calls"), ("Hi.", [], 3, "stop"), ("", [], 0, "stop"),
    ]  # fmt: skip
    last = chunks(answer)[-1] if streamed else answer.json()
    assert last["usage"]["completion_tokens"] == tokens + 3 and "queue_ms" in last["timings"]


def folds(events: list[dict[str, Any]]) -> list[tuple[str, list[str], int, str]]:
    """Returns for each choice its text, its calls, the number of scored tokens, and its finish reason."""
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
async def test_chat_call_cut_off_does_not_finish_as_tool_calls(
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


@pytest.mark.parametrize("streamed", [False, True])
async def test_chat_loop_in_channels(gpt_oss: Model, streamed: bool) -> None:
    gpt_oss.says = [CALLED, ANSWERED, "<|channel|>final<|message|>Bye.<|return|>"]
    asked: dict[str, Any] = {**ASKED, "tools": TOOLS, "reasoning_effort": "high"}
    async with gpt_oss.served() as url, openai_sdk(url) as sdk:
        first = await whole_or_streamed(sdk, streamed, **asked)
        message, (call,) = first.message, first.message.tool_calls
        assert (first.finish_reason, message.content, message.reasoning_content) == ("tool_calls", "I look.", "Hm.")
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        messages = [*ASKED["messages"], message, {"role": "tool", "tool_call_id": call.id, "content": "20°"}]
        second = await whole_or_streamed(sdk, streamed, **asked | {"messages": messages})
        assert (second.finish_reason, second.message.content) == ("stop", "Sunny.")
        assert second.message.reasoning_content == "Good." and not second.message.tool_calls
        more = [*messages, second.message, {"role": "user", "content": "Bye"}]
        third = await whole_or_streamed(sdk, streamed, **asked | {"messages": more})
    assert (third.message.content, third.finish_reason) == ("Bye.", "stop")
    assert all("\nReasoning: high\n" in prompt for prompt in gpt_oss.prompts)
    assert gpt_oss.prompts[1].endswith(HISTORY)
    assert "Hm." not in gpt_oss.prompts[2] and "Good." not in gpt_oss.prompts[2]
    assert gpt_oss.prompts[2].endswith(
        "<|channel|>final<|message|>Sunny.<|end|><|start|>user<|message|>Bye<|end|><|start|>assistant"
    )


@pytest.mark.parametrize("streamed", [False, True])
async def test_stop_text_ends_the_answer_and_not_a_thought_or_a_header(gpt_oss: Model, streamed: bool) -> None:
    said = "<|channel|>analysis<|message|>A final stop.<|end|><|start|>assistant<|channel|>final<|message|>"
    gpt_oss.says = [f"{said}Do not stop now.<|return|>"]
    async with gpt_oss.served() as url, openai_sdk(url) as sdk:
        choice = await whole_or_streamed(sdk, streamed, **ASKED, stop=["final", "stop", "<|end|>"])
    assert (choice.finish_reason, choice.message.content) == ("stop", "Do not ")
    assert choice.message.reasoning_content == "A final stop."


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_chat_chunks_in_channels_show_no_mark(gpt_oss: Model, size: int) -> None:
    gpt_oss.says, gpt_oss.size = [CALLED] * 2, size
    scored = {"logprobs": True, "top_logprobs": 1}
    async with gpt_oss.served() as url, httpx.AsyncClient(base_url=url) as http:
        asked = ASKED | {"tools": TOOLS, "stream": True}
        events = [chunks(await http.post("/v1/chat/completions", json=asked | more)) for more in ({}, scored)]
    text, _, scores, finish = folds(events[1])[0]
    assert (text, finish) == ("I look.", "tool_calls") and folds(events[0])[0][0] == text
    assert scores == len(gpt_oss.tokenizer.encode_now([CALLED], False)[0]) and "<|" not in json.dumps(events[0])


@pytest.mark.parametrize("streamed", [False, True])
async def test_chat_that_goes_on_within_a_call_tells_of_the_whole_call(qwen: Model, streamed: bool) -> None:
    place = SAID.index("Paris")
    (before,) = qwen.tokenizer.encode_now([SAID[:place]], False)
    qwen.says = [SAID[place:]]
    async with qwen.served() as url, openai_sdk(url) as sdk:
        more = {"continue_from": {"ids": before}}
        rest = await whole_or_streamed(sdk, streamed, **ASKED, tools=TOOLS, extra_body=more)
    assert rest.finish_reason == "tool_calls" and not rest.message.content
    assert not hasattr(rest.message, "reasoning_content")
    told = [(call.function.name, json.loads(call.function.arguments)) for call in rest.message.tool_calls]
    assert told == [("get_weather", {"city": "Paris"}), ("now", {})]
