"""Tool calls of untrained models, which are well-formed only by the grammar: whole conversations in both SDKs.

Sampling is at temperature 1, so that only the grammar can make an answer correct.
"""

import json
from typing import Any, Literal

import anthropic
import openai
import pytest
from jsonschema_rs import Draft202012Validator

from tests.e2e.server import Server

pytestmark = pytest.mark.parametrize("served", ["qwen3", "qwen35", "glm", "plain", "llama3", "mistral"], indirect=True)

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        },
        "required": ["city", "unit", "days"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
CLAUDES: list[Any] = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
QUESTION: list[Any] = [{"role": "user", "content": "Weather?"}]
ASKED: dict[str, Any] = {"model": "m", "messages": QUESTION, "max_tokens": 400}
SEED = {"seed": 5}
FORCED: Any = {"type": "function", "function": {"name": "get_weather"}}


Told = tuple[str, str, list[str], str | None, int]  # text, thought, arguments, finish reason, tokens with scores


def whole(sdk: openai.OpenAI, **fields: Any) -> Told:
    choice = sdk.chat.completions.create(**fields).choices[0]
    message, scores = choice.message, (choice.logprobs and choice.logprobs.content) or []
    calls = [call.function.arguments for call in message.tool_calls or [] if call.type == "function"]
    thought = (message.model_extra or {}).get("reasoning", "")
    return message.content or "", thought, calls, choice.finish_reason, len(scores)


def streamed(sdk: openai.OpenAI, **fields: Any) -> Told:
    text, thought, finish, scores = "", "", None, 0
    calls: list[str] = []
    for chunk in sdk.chat.completions.create(**fields, stream=True):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        thought += (choice.delta.model_extra or {}).get("reasoning", "")
        for call in choice.delta.tool_calls or []:
            calls += [""] * (call.index + 1 - len(calls))
            calls[call.index] += (call.function and call.function.arguments) or ""
        finish = choice.finish_reason or finish
        scores += len((choice.logprobs and choice.logprobs.content) or [])
    return text, thought, calls, finish, scores


def fits(name: str, arguments: Any) -> bool:
    return Draft202012Validator(SCHEMAS[name]).is_valid(arguments)


def test_chat_tool_call_with_result_is_answered(chat: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, "tools": TOOLS, "tool_choice": "required", "reasoning_effort": "none", **SEED}
    asked["parallel_tool_calls"] = False
    first = chat.chat.completions.create(**asked).choices[0]
    with chat.chat.completions.stream(**asked) as stream:
        again = stream.get_final_completion().choices[0]
    for one in (first, again):
        (call,) = one.message.tool_calls
        assert (one.finish_reason, one.message.content) == ("tool_calls", None)
        assert fits(call.function.name, json.loads(call.function.arguments))
    assert again.message.tool_calls[0].function.arguments == first.message.tool_calls[0].function.arguments
    result = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "20"}
    more = {**asked, "messages": [*QUESTION, first.message, result], "tool_choice": "none", "max_tokens": 24}
    told = whole(chat, **more)
    assert told == streamed(chat, **more) and not told[2] and told[3] in ("stop", "length")


def test_responses_tool_call_with_result_is_answered_like_chat(chat: openai.OpenAI) -> None:
    flat: list[Any] = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
    asked: dict[str, Any] = {"model": "m", "input": "Weather?", "max_output_tokens": 400, "tools": flat}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False, "reasoning": {"effort": "none"}}
    first = chat.responses.create(**asked, extra_body=SEED)
    with chat.responses.stream(**asked, extra_body=SEED) as stream:
        again = stream.get_final_response()
    (call,), (same,) = first.output, again.output
    assert call.type == same.type == "function_call" and call.arguments == same.arguments
    assert fits(call.name, json.loads(call.arguments))
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "20"}
    history: list[Any] = [{"role": "user", "content": "Weather?"}, *first.output, result]
    more: dict[str, Any] = {**asked, "input": history, "tool_choice": "none", "max_output_tokens": 24}
    answer = chat.responses.create(**more, extra_body=SEED)
    called = {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    messages: list[Any] = [*QUESTION, {"role": "assistant", "tool_calls": [called]}]
    messages.append({"role": "tool", "tool_call_id": call.call_id, "content": "20"})
    fields = {**ASKED, "messages": messages, "tools": TOOLS, "tool_choice": "none", "reasoning_effort": "none"}
    assert answer.output_text == whole(chat, **{**fields, **SEED, "max_tokens": 24})[0]


def test_messages_tool_call_with_result_is_answered(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        **ASKED,
        "tools": CLAUDES,
        "extra_body": SEED,
        "tool_choice": {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    }
    first = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        again = stream.get_final_message()
    for message in (first, again):
        (call,) = message.content
        assert message.stop_reason == "tool_use" and call.type == "tool_use"
        assert (call.name, fits(call.name, call.input)) == ("get_weather", True)
    assert again.content[0].input == first.content[0].input  # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "20"}  # type: ignore[union-attr]
    said = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    answer = claude.messages.create(**{**asked, "messages": said, "tool_choice": {"type": "none"}, "max_tokens": 24})
    assert [block.type for block in answer.content] == ["text"] and answer.stop_reason in ("end_turn", "max_tokens")


def test_anthropic_tool_runner_calls_tools_and_thread_is_refused(claude: anthropic.Anthropic) -> None:
    """The newest tool runner first asks for a thread, and goes on after the error `thread_unsupported_request`."""

    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Returns the weather of a city."""
        return f"20 in {city}"

    runner = claude.beta.messages.tool_runner(
        model="m", max_tokens=400, messages=QUESTION, tools=[anthropic.beta_tool(get_weather)], max_iterations=2,
        tool_choice={"type": "any", "disable_parallel_tool_use": True}, extra_body=SEED,
    )  # fmt: skip
    assert next(iter(runner)).stop_reason == "tool_use"
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(**ASKED, extra_body={"thread": {"type": "create"}})
    told: Any = refused.value.body
    assert told["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_optional_tool_call_streamed_equals_unstreamed(chat: openai.OpenAI) -> None:
    """The model may or may not call a tool; the finish reason tool_calls implies a call."""
    for seed in range(3):
        fields: dict[str, Any] = {**ASKED, "tools": TOOLS, "seed": seed, "max_tokens": 60, "logprobs": True}
        told = whole(chat, **fields)
        assert told == streamed(chat, **fields) and told[4] > 0
        assert (told[3] == "tool_calls") <= bool(told[2])


def test_tool_call_tag_forced_first_gives_a_call(server: Server, chat: openai.OpenAI) -> None:
    """The tag is one token, special or not. An answer that begins with the tag must be a call."""
    bodies = [{"prompt": tag, "add_special_tokens": False} for tag in ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]")]
    ids = [server.client.post("/tokenize", json=body).json()["tokens"] for body in bodies]
    (lead,) = [str(found[0]) for found in ids if len(found) == 1]
    fields: dict[str, Any] = {**ASKED, "tools": TOOLS, "reasoning_effort": "none", "temperature": 0, "max_tokens": 200}
    choice = chat.chat.completions.create(**fields, logit_bias={lead: 100}).choices[0]
    assert choice.message.tool_calls and choice.message.content is None


@pytest.mark.parametrize("most", [1, 4, 16, 40])
def test_forced_call_cut_off_shows_no_syntax(chat: openai.OpenAI, claude: anthropic.Anthropic, most: int) -> None:
    """The generated part of the call is shown as a call, whose arguments are the beginning of a JSON text."""
    fields: dict[str, Any] = {**ASKED, "tools": TOOLS, "tool_choice": FORCED, "max_tokens": most, **SEED}
    told = whole(chat, **fields, reasoning_effort="none")
    assert told == streamed(chat, **fields, reasoning_effort="none")
    assert (told[0], told[3]) == ("", "length") and all(one in ("", "{") or one.startswith('{"') for one in told[2])
    choice: Any = {"type": "tool", "name": "get_weather"}
    asked: dict[str, Any] = {**ASKED, "tools": CLAUDES, "tool_choice": choice, "max_tokens": most, "extra_body": SEED}
    thinks: dict[str, Any] = {"type": "disabled"}
    message = claude.messages.create(**asked, thinking=thinks)
    assert message.stop_reason == "max_tokens"
    assert "".join(block.text for block in message.content if block.type == "text") == ""
    flat: list[Any] = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    answer = chat.responses.create(
        model="m", input="Weather?", max_output_tokens=most, tools=flat, tool_choice="required",
        reasoning={"effort": "none"}, extra_body=SEED,
    )  # fmt: skip
    assert answer.status == "incomplete" and answer.output_text == ""
