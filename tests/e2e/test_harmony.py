"""A tiny random gpt-oss: conversations with reasoning, a call, its result and an answer, in all API formats.

The grammar alone makes its messages well-formed, as in test_tools.py.
"""

import json
from typing import Any

import anthropic
import openai
import pytest
from jsonschema_rs import Draft202012Validator

from tests.e2e.server import Server
from tests.e2e.test_tools import streamed, whole

pytestmark = pytest.mark.parametrize("served", ["gpt_oss"], indirect=True)

SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
QUESTION: list[Any] = [{"role": "user", "content": "Weather?"}]
ASKED: dict[str, Any] = {"model": "m", "messages": QUESTION, "max_tokens": 800}
SEED = {"seed": 3}


def fits(arguments: Any) -> bool:
    return Draft202012Validator(SCHEMA).is_valid(arguments)


def test_chat_thinks_calls_and_answers(chat: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, **SEED, "tools": TOOLS, "tool_choice": "required", "reasoning_effort": "high"}
    message = chat.chat.completions.create(**asked).choices[0].message
    text, _, arguments, finish, _ = told = whole(chat, **asked)
    assert told == streamed(chat, **asked) and (text, finish) == ("", "tool_calls") and message.tool_calls
    assert fits(json.loads(arguments[0])) and len(arguments) == len(message.tool_calls) == 1
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "20"}
    more = {**asked, "messages": [*QUESTION, message, result], "tool_choice": "none", "max_tokens": 300}
    answer = whole(chat, **more)
    assert answer == streamed(chat, **more) and not answer[2] and answer[3] in ("stop", "length")
    assert "<|" not in str(answer) and "<|" not in str(told)


def responded(sdk: openai.OpenAI, streamed: bool, **fields: Any) -> Any:
    if not streamed:
        return sdk.responses.create(**fields, extra_body=SEED)
    with sdk.responses.stream(**fields, extra_body=SEED) as stream:
        *_, last = stream  # `get_final_response` knows no answer that stopped at its limit
        return last.response


def test_responses_think_call_and_answer(chat: openai.OpenAI) -> None:
    flat: list[Any] = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}]
    asked: dict[str, Any] = {"model": "m", "input": "Weather?", "max_output_tokens": 800, "tools": flat}
    asked |= {"tool_choice": "required", "reasoning": {"effort": "high"}}
    first, again = (responded(chat, streamed, **asked) for streamed in (False, True))
    for one in (first, again):
        *thoughts, call = one.output
        assert call.type == "function_call" and fits(json.loads(call.arguments))
        assert all(item.type == "reasoning" for item in thoughts)
        tokens = one.usage.output_tokens_details.reasoning_tokens
        assert (tokens > 0) >= bool(thoughts) and tokens < one.usage.output_tokens
    assert first.output[-1].arguments == again.output[-1].arguments
    result: Any = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "20"}
    history: list[Any] = [{"role": "user", "content": "Weather?"}, *first.output, result]
    more: dict[str, Any] = {**asked, "input": history, "tool_choice": "none", "max_output_tokens": 300}
    answer, same_answer = (responded(chat, streamed, **more) for streamed in (False, True))
    assert answer.output_text == same_answer.output_text and "<|" not in answer.output_text
    chat_call = {"name": "get_weather", "arguments": first.output[-1].arguments}
    said = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": chat_call}]}
    said["reasoning_content"] = "".join(part.text for item in first.output[:-1] for part in item.content)
    messages = [*QUESTION, said, {"role": "tool", "tool_call_id": "1", "content": "20"}]
    same = {**ASKED, **SEED, "messages": messages, "tools": TOOLS, "tool_choice": "none", "max_tokens": 300}
    assert whole(chat, **same, reasoning_effort="high")[0] == answer.output_text


def test_thoughts_before_a_forced_call_are_reasoning(server: Server, chat: openai.OpenAI) -> None:
    """A model that always prefers to think does so until its tokens are used up."""

    def first_id(text: str) -> str:
        body = {"prompt": text, "add_special_tokens": False}
        return str(server.client.post("/tokenize", json=body).json()["tokens"][0])

    prefers = {first_id("<|channel|>"): 100, first_id("analysis"): 100}
    asked: dict[str, Any] = {**ASKED, **SEED, "max_tokens": 120, "tools": TOOLS, "tool_choice": "required"}
    text, thought, calls, finish, _ = told = whole(chat, **asked, logit_bias=prefers)
    assert told == streamed(chat, **asked, logit_bias=prefers)
    assert (text, calls, finish) == ("", [], "length") and "a" in thought
    flat: list[Any] = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}]
    response = chat.responses.create(
        model="m", input="Weather?", max_output_tokens=120, tools=flat, tool_choice="required",
        extra_body={**SEED, "logit_bias": prefers},
    )  # fmt: skip
    (item,) = response.output
    assert item.type == "reasoning" and item.content and item.content[0].text == thought
    assert response.usage and 0 < response.usage.output_tokens_details.reasoning_tokens < 120


def messaged(sdk: anthropic.Anthropic, streamed: bool, **fields: Any) -> anthropic.types.Message:
    if not streamed:
        return sdk.messages.create(**fields, extra_body=SEED)
    with sdk.messages.stream(**fields, extra_body=SEED) as stream:
        return stream.get_final_message()


def test_messages_think_call_and_answer(claude: anthropic.Anthropic) -> None:
    tools = [{"name": "get_weather", "input_schema": SCHEMA}]
    asked: dict[str, Any] = {**ASKED, "tools": tools, "tool_choice": {"type": "any"}}
    asked |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    first, again = (messaged(claude, streamed, **asked) for streamed in (False, True))
    for one in (first, again):
        *thoughts, call = one.content
        assert one.stop_reason == "tool_use" and call.type == "tool_use" and fits(call.input)
        assert all(block.type == "thinking" for block in thoughts)
    assert [block.type for block in first.content] == [block.type for block in again.content]
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "20"}  # type: ignore[union-attr]
    said = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    more = {**asked, "messages": said, "tool_choice": {"type": "none"}, "max_tokens": 300}
    answers = [messaged(claude, streamed, **more) for streamed in (False, True)]
    blocks = [[(block.type, getattr(block, "text", "")) for block in answer.content] for answer in answers]
    assert blocks[0] == blocks[1] and {kind for kind, _ in blocks[0]} <= {"thinking", "text"}
    assert answers[0].stop_reason in ("end_turn", "max_tokens") and "<|" not in str(blocks)


def test_chat_answer_keeps_to_its_schema(chat: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    told = whole(chat, **ASKED, **SEED, response_format=form)
    assert told == streamed(chat, **ASKED, **SEED, response_format=form)
    assert told[3] == "stop" and fits(json.loads(told[0]))


def test_completion_shows_the_text_of_ordinary_tokens_only(server: Server) -> None:
    body = {"model": "m", "prompt": "Hello", "max_tokens": 40, **SEED}
    answer = server.client.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] > 0 and "<|" not in answer["choices"][0]["text"]
