"""OpenAI's responses: the official SDK and bare HTTP against the app with a scripted model."""

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from frontend.text.tokenizer import Tokenizer
from shared.messages import Outcome
from tests.fakes import MODEL, FakePool
from tests.frontend.api.harness import (
    parse_events,
)
from tests.frontend.api.scripted import ANSWERED, CALLED, CITY, HISTORY, NOW, SAID, openai_sdk
from tests.frontend.serving import http_client
from tests.frontend.speaking import Model

TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "description": "Of a city.", "parameters": CITY},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]


ASKED: dict[str, Any] = {"model": MODEL, "input": "Weather?", "max_output_tokens": 500}


async def answered(sdk: openai.AsyncOpenAI, streamed: bool, **fields: Any) -> Any:
    if not streamed:
        return await sdk.responses.create(**fields)
    async with sdk.responses.stream(**fields) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_response()


async def sent(model: Model, **more: Any) -> httpx.Response:
    async with http_client(model.pool, model.tokenizer) as http:
        return await http.post("/v1/responses", json=ASKED | more)


async def post(model: Model, **more: Any) -> Any:
    return (await sent(model, **more)).json()


async def told(model: Model, **more: Any) -> list[dict[str, Any]]:
    """Returns the events of a stream.

    Asserts that an event's name is its type, and that sequence numbers count from 0.
    """
    answer = await sent(model, **more, stream=True)
    events = parse_events(answer.text)
    names = [line.removeprefix("event: ") for line in answer.text.split("\n") if line.startswith("event: ")]
    assert [event["type"] for event in events] == names
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


@pytest.mark.parametrize("streamed", [False, True])
async def test_response_loop_of_calls_and_results(qwen: Model, streamed: bool) -> None:
    qwen.says = [SAID, "<think>\nGood.\n</think>\n\nSunny."]
    async with qwen.served() as url, openai_sdk(url) as sdk:
        first = await answered(sdk, streamed, **ASKED, tools=TOOLS)
        thought, said, weather, now = first.output
        assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Hm.", [])
        assert (said.content[0].text, first.output_text, first.status) == ("I look.", "I look.", "completed")
        assert [(call.name, json.loads(call.arguments), call.status) for call in (weather, now)] == [
            ("get_weather", {"city": "Paris"}, "completed"), ("now", {}, "completed"),
        ]  # fmt: skip
        history: list[Any] = [{"role": "user", "content": "Weather?"}, *first.output]
        history += [
            {"type": "function_call_output", "call_id": weather.call_id, "output": "20°"},
            {
                "type": "function_call_output",
                "call_id": now.call_id,
                "output": [{"type": "input_text", "text": "noon"}],
            },
        ]
        second = await answered(sdk, streamed, **{**ASKED, "input": history}, tools=TOOLS)
    assert [item.type for item in second.output] == ["reasoning", "message"] and second.output_text == "Sunny."
    assert qwen.prompts[1].partition("Weather?<|im_end|>\n")[2] == (
        f"<|im_start|>assistant\n{SAID}<|im_end|>\n<|im_start|>user\n<tool_response>\n20°\n</tool_response>"
        "\n<tool_response>\nnoon\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("streamed", [False, True])
async def test_response_loop_of_llama_calls(llama: Model, streamed: bool) -> None:
    llama.says = ['{"name": "get_weather", "parameters": {"city": "Paris"}}', "Sunny."]
    async with llama.served() as url, openai_sdk(url) as sdk:
        first = await answered(sdk, streamed, **ASKED, tools=TOOLS)
        (call,) = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "20°"}
        second = await answered(sdk, streamed, **{**ASKED, "input": [*first.output, result]}, tools=TOOLS)
    assert (call.name, json.loads(call.arguments), second.output_text) == (
        "get_weather", {"city": "Paris"}, "Sunny.",
    )  # fmt: skip


async def test_response_repeats_its_request(qwen: Model) -> None:
    qwen.says = ["Hi."]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    more = {"tools": TOOLS, "tool_choice": choice, "metadata": {"a": "b"}, "store": True, "temperature": 0.5, "seed": 7}
    said = await post(qwen, **more, instructions="x", user="me", reasoning={"effort": "none", "summary": "auto"})
    assert (
        said["id"].startswith("resp_") and said["object"] == "response" and said["created_at"] <= said["completed_at"]
    )
    expected = {"metadata": {"a": "b"}, "store": False, "temperature": 0.5, "seed": 7, "tool_choice": choice,
                "user": "me", "instructions": "x", "max_output_tokens": 500, "error": None, "incomplete_details": None,
                "reasoning": {"effort": "none", "summary": None}, "text": {"format": {"type": "text"}},
                "previous_response_id": None, "top_p": 1.0, "parallel_tool_calls": True}  # fmt: skip
    assert {name: said[name] for name in expected} == expected
    assert [(tool["name"], tool["strict"]) for tool in said["tools"]] == [("get_weather", False), ("now", False)]
    # the function is shown in the prompt, but must not be called
    assert "get_weather" not in qwen.grammars[0].partition("%json")[0]


@pytest.mark.parametrize("spoken", [0, 1, 5])
async def test_response_stream_that_fails_never_completes(qwen: Model, spoken: int) -> None:
    qwen.outcome, qwen.size = Outcome.ERROR, 1
    qwen.says = ["Hello"[:spoken]] * 2
    events = await told(qwen)
    *_, error, failed = events
    assert (error["type"], error["code"], error["error"]["code"]) == ("error", "worker_error", "worker_error")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert not {"response.completed", "response.incomplete"} & {event["type"] for event in events}
    async with qwen.served() as url, openai_sdk(url) as sdk:
        with pytest.raises(openai.APIError, match="worker failed"):
            await answered(sdk, True, **ASKED)


class Answer(BaseModel):
    city: str


async def test_structured_output_requested_in_three_ways(qwen: Model) -> None:
    qwen.says = ['<think>\n</think>\n\n{"city": "Paris"}'] + ['{"city": "Paris"}'] * 2
    async with qwen.served() as url, openai_sdk(url) as sdk:
        parsed = await sdk.responses.parse(**ASKED, text_format=Answer)
        plain = await sdk.responses.create(
            **ASKED, text={"format": {"type": "json_object"}, "verbosity": "medium"}, reasoning={"effort": "none"}
        )
        await sdk.responses.create(**ASKED, extra_body={"guided_choice": ["a", "b"]})
    assert parsed.output_parsed == Answer(city="Paris")
    assert plain.output_text == '{"city": "Paris"}' and plain.text and plain.text.format
    assert plain.text.format.type == "json_object"
    assert all(qwen.grammars) and len(set(qwen.grammars)) == 3


async def test_response_tool_choice_becomes_a_grammar(qwen: Model) -> None:
    function = {"type": "function", "name": "now"}
    names = [None, "required", "none", function, {"type": "allowed_tools", "mode": "required", "tools": [function]}]
    qwen.says = [NOW] * len(names)
    for name in names:
        await post(qwen, tools=TOOLS, tool_choice=name, parallel_tool_calls=False)
    auto, required, none, one, allowed = qwen.grammars
    assert one == allowed and "get_weather" not in one and "%json" not in none and "get_weather" in required
    assert len({auto, required, none, one}) == 4


async def test_response_is_not_stored(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        for method, path, status in (
            ("GET", "/v1/responses/resp_1", 404), ("DELETE", "/v1/responses/resp_1", 404),
            ("POST", "/v1/responses/resp_1/cancel", 404), ("PUT", "/v1/responses", 405),
        ):  # fmt: skip
            answer = await http.request(method, path)
            assert answer.status_code == status and answer.json()["error"]["type"] == "not_found_error"


async def test_compaction_is_refused_in_words(qwen: Model) -> None:
    async with qwen.served() as url, openai_sdk(url) as sdk:
        with pytest.raises(openai.APIStatusError, match="Ask the model for a summary") as it:
            await sdk.responses.compact(model="tiny", input="Hello")
    assert it.value.status_code == 501 and it.value.code == "unsupported_route"


@pytest.mark.parametrize("streamed", [False, True])
async def test_response_loop_in_channels(gpt_oss: Model, streamed: bool) -> None:
    gpt_oss.says = [CALLED, ANSWERED]
    asked = {**ASKED, "tools": TOOLS, "reasoning": {"effort": "minimal"}}
    async with gpt_oss.served() as url, openai_sdk(url) as sdk:
        first = await answered(sdk, streamed, **asked)
        thought, text, call = first.output
        assert [thought.content[0].text, text.content[0].text] == ["Hm.", "I look."]
        assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", '{"city": "Paris"}')
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "20°"}
        history = [{"role": "user", "content": "Weather?"}, *first.output, result]
        second = await answered(sdk, streamed, **asked | {"input": history})
    assert (second.output_text, second.output[0].content[0].text, second.status) == ("Sunny.", "Good.", "completed")
    opened, ended = "<|message|>", "<|end|>"  # the tokens around the thought count as reasoning tokens
    counted = len(gpt_oss.tokenizer.encode_now([f"{opened}Good.{ended}"], False)[0])
    assert second.usage.output_tokens_details.reasoning_tokens == counted
    assert "\nReasoning: low\n" in gpt_oss.prompts[0] and gpt_oss.prompts[1].endswith(HISTORY)
