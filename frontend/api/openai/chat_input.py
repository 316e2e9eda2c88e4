"""The messages of OpenAI's chat completions as turns, and the prompt they make; `/tokenize` reads them, too."""

from collections.abc import Mapping
from typing import Any

from frontend.api import tools
from frontend.api.chat_prompt import MAX_MESSAGES, ROLES, ChatMessage, Prompt, call, content, parsed, prompt, turn
from frontend.api.common import ModelContext
from frontend.api.fields import (
    Field,
    Table,
    anything,
    boolean,
    choice,
    each,
    exactly,
    integer,
    only,
    reads,
    record,
    refused,
    some_text,
)
from frontend.errors import BadRequest, Unprocessable

MAX_CALLS = 128
THOUGHTS = ("reasoning_content", "reasoning")  # two names of one thing

_call = record({
    "id": Field(some_text, required=True),
    "type": Field(choice("function"), "function"),
    "function": Field(
        record({
            "name": Field(some_text, required=True),
            "arguments": Field(exactly(str), ""),
            "parsed_arguments": Field(anything),  # the SDK's own
        }),
        required=True,
    ),
    "index": Field(integer(0)),  # of a stream
})  # fmt: skip


@reads(_call.schema)
def _called(name: str, value: Any) -> ChatMessage:
    """As templates want it: the arguments as an object, unless they are none."""
    read = _call(name, value)
    function = read["function"]
    return call(read["id"], function["name"], parsed(function["arguments"] or "{}"))


_content = content(cache_control=anything, prompt_cache_breakpoint=anything)
_message = record({
    "role": Field(choice("system", "developer", "user", "assistant", "tool"), required=True),
    "content": Field(_content),
    "name": Field(some_text),
    "tool_call_id": Field(some_text),
    "tool_calls": Field(each(_called, MAX_CALLS, empty=True), ()),
    **{name: Field(exactly(str)) for name in THOUGHTS},
    "function_call": Field(refused),
    "refusal": Field(refused),
    "audio": Field(refused),
    "annotations": Field(anything),
    "parsed": Field(anything),  # the SDK's own
    "type": Field(only("text", "message")),  # lm-evaluation-harness' and the Responses API's word for any message
})  # fmt: skip


def _having(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"required": [name], "properties": {name: schema}}


_from_assistant = {"properties": {"role": {"const": "assistant"}}}
_thought: list[dict[str, Any]] = [_having(name, {"type": "string", "minLength": 1}) for name in THOUGHTS]
_called_or_thought = {"anyOf": [_having("tool_calls", {"type": "array", "minItems": 1}), *_thought]}


@reads({"allOf": [
    _message.schema,
    {"anyOf": [_having("content", {"not": {"type": "null"}}), {"allOf": [_from_assistant, _called_or_thought]}]},
    {"anyOf": [_from_assistant, {"properties": {"tool_calls": {"maxItems": 0}}}]},
]})  # fmt: skip
def _turn(name: str, value: Any) -> ChatMessage:
    """Only an assistant's message that calls or thinks may have no content."""
    message = _message(name, value)
    role, calls = message["role"], list(message["tool_calls"])
    if calls and role != "assistant":
        raise Unprocessable(
            f"`{name}.tool_calls` belong to the assistant", param=f"{name}.tool_calls", code="out_of_range"
        )
    thought = next((message[name] for name in THOUGHTS if message[name]), None)
    if message["content"] is None and not (role == "assistant" and (calls or thought)):
        raise BadRequest(f"`{name}.content` is missing", param=f"{name}.content", code="missing_field")
    also = {key: message[key] for key in ("name", "tool_call_id") if message[key] is not None}
    return turn(ROLES.get(role, role), message["content"] or "", thought, calls) | also


OPENAI_CHAT: Table = {
    "messages": Field(each(_turn, MAX_MESSAGES)),
    "chat_template_kwargs": Field(exactly(dict), {}),
    "add_generation_prompt": Field(boolean),
    "continue_final_message": Field(boolean, False),
    **tools.OPENAI_TOOLS,
}


async def openai_prompt(values: Mapping[str, Any], context: ModelContext) -> Prompt:
    """The prompt for fields read by the OPENAI_CHAT table."""
    generate, resume = values["add_generation_prompt"], values["continue_final_message"]
    if generate and resume:
        raise Unprocessable(
            "`continue_final_message` cannot go with `add_generation_prompt`",
            param="continue_final_message", code="out_of_range",
        )  # fmt: skip
    kwargs = tools.effort(values["reasoning_effort"], "reasoning_effort", context) | values["chat_template_kwargs"]
    return await prompt(values["messages"], context, kwargs, values["tools"], generate is not False, resume)
