"""What the chat dialects share: how messages become a prompt. Knows text parts and the chat template, no envelope."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from frontend.errors import BadRequest, Unprocessable
from frontend.protocols import functions
from frontend.protocols.common import Context, check_ids
from frontend.protocols.fields import (
    Field,
    Reader,
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
    wrong_type,
)
from frontend.protocols.turns import Turn, call, checked, turn
from frontend.speech.offer import Function
from frontend.speech.style import Thinking
from frontend.template import TemplateError

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
MAX_CALLS = 128
MARK = "\ue000"  # private use: where the text to be continued ends, for the time of rendering
THOUGHTS = ("reasoning_content", "reasoning")  # two names of one thing
ROLES = {"developer": "system"}  # OpenAI's newer name


def content(*kinds: str, empty: bool = False, **ignored: Reader) -> Reader:
    """A text, or an array of text parts, which are joined as they stand; `empty`: there may be none.

    Parts are called one of `kinds` (none given: text) and may have the `ignored` fields.
    """
    kinds = kinds or ("text",)
    table: Table = {
        "type": Field(choice(*kinds), required=True),
        "text": Field(exactly(str), required=True),
        **{name: Field(reader) for name, reader in ignored.items()},
    }
    plain = record(table)

    @reads(plain.schema)
    def part(name: str, value: Any) -> str:
        kind = value.get("type") if type(value) is dict else None
        if type(kind) is str and kind not in kinds:
            raise Unprocessable(
                f"`{name}.type` must be {' or '.join(kinds)}: {kind!r:.80} is not offered by this server",
                param=f"{name}.type", code="unsupported_content",
            )  # fmt: skip
        return str(plain(name, value)["text"])

    parts = each(part, MAX_PARTS, empty=empty)

    @reads({"anyOf": [{"type": "string"}, parts.schema]})
    def reader(name: str, value: Any) -> str:
        if type(value) is not str and type(value) is not list:
            raise wrong_type(name, value, "a string or an array of text parts")
        return value if type(value) is str else "".join(parts(name, value))

    return reader


class Prompt(NamedTuple):
    """A rendered conversation."""

    ids: list[int]
    begins: Thinking  # where the answer does


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
def _called(name: str, value: Any) -> Turn:
    """As templates want it: the arguments as an object, unless they are none."""
    read = _call(name, value)
    function = read["function"]
    return call(read["id"], function["name"], parsed(function["arguments"] or "{}"))


def parsed(arguments: str) -> Any:
    """A call's arguments as an object, or as they stand where they are none."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    return value if type(value) is dict else arguments


_content = content()
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
def _turn(name: str, value: Any) -> Turn:
    """An assistant who calls, or only thought, need not say anything."""
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
    **functions.OPENAI_TOOLS,
}


async def openai_prompt(values: Mapping[str, Any], context: Context) -> Prompt:
    """The prompt for fields read by the OPENAI_CHAT table."""
    generate, resume = values["add_generation_prompt"], values["continue_final_message"]
    if generate and resume:
        raise Unprocessable(
            "`continue_final_message` cannot go with `add_generation_prompt`",
            param="continue_final_message", code="out_of_range",
        )  # fmt: skip
    kwargs = functions.effort(values["reasoning_effort"], "reasoning_effort", context) | values["chat_template_kwargs"]
    return await prompt(values["messages"], context, kwargs, values["tools"], generate is not False, resume)


async def prompt(
    turns: Sequence[Turn],
    context: Context,
    kwargs: Mapping[str, Any],
    offered: Iterable[Function] = (),
    generate: bool = True,
    resume: bool = False,
    param: str = "messages",
) -> Prompt:
    """The rendered conversation: with the assistant's turn opened (`generate`) or the last one left open.

    `param` is the field that it came in. Raises Unprocessable when the model has no chat template, BadRequest when its
    template refuses the messages.
    """
    if not context.template:
        raise Unprocessable(
            "this model has no chat template; use /v1/completions", param=param, code="no_chat_template"
        )
    turns = checked(turns, context.style, answered=generate or resume, param=param)
    tools = [one.shown for one in offered] or None
    try:
        text = (
            _opened(turns, context, tools, kwargs)
            if resume
            else context.template.render(turns, generate, tools, **kwargs)
        )
    except TemplateError as error:
        error.param = param if error.param == "messages" else error.param
        raise
    ids = await context.tokenizer.encode(text, add_special_tokens=False) if text else []
    if not ids:
        raise BadRequest(f"`{param}` has no tokens", param=param, code="empty_prompt")
    check_ids(param, ids, context.vocab_size)
    said = turns[-1]["content"] if resume else ""
    return Prompt(ids, context.style.goes_on(said) if said else context.style.begins(text))


def _opened(
    turns: Sequence[Turn], context: Context, tools: Sequence[dict[str, Any]] | None, kwargs: Mapping[str, Any]
) -> str:
    """The prompt up to the end of the last message's content."""
    last = turns[-1] | {"content": turns[-1]["content"] + MARK}
    text, mark, _ = context.template.render([*turns[:-1], last], False, tools, **kwargs).rpartition(MARK)
    if not mark:
        raise Unprocessable(
            "the model's chat template does not show the last message, so it cannot be continued",
            param="messages", code="unsupported_field",
        )  # fmt: skip
    return text
