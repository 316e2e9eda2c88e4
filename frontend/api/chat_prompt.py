"""What the chat dialects share: messages as chat templates know them (`ChatMessage`), and how those become a prompt.

Knows text parts, tool calls and the chat template; knows no dialect. How a dialect's messages are read as turns is told
in its file `…_input`.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import msgspec

from frontend.api.common import ModelContext, check_ids
from frontend.errors import BadRequest, Unprocessable
from frontend.output_parser.formats import ModelFormat, Reasoning, ToolFormat
from frontend.output_parser.tool_choice import Function
from frontend.text.chat_template import TemplateError

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
MARK = "\ue000"  # private use: where the text to be continued ends, for the time of rendering
ROLES = {"developer": "system"}  # OpenAI's newer name
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # what templates call a thought
MISTRALS_ID = re.compile(r"[A-Za-z0-9]{9}")

ChatMessage = dict[str, Any]  # role, content (a text), and what else a template may use of a message


class _TextPart(Protocol):
    @property
    def text(self) -> str: ...


def joined(content: str | Sequence[_TextPart] | None) -> str:
    """A message's text: its parts, joined as they stand."""
    return content if isinstance(content, str) else "".join([part.text for part in content or ()])


def parsed(arguments: str) -> Any:
    """A call's arguments as an object, or as they stand where they are none."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    return value if type(value) is dict else arguments


# turns


def turn(role: str, said: str, thought: str | None = None, calls: Sequence[ChatMessage] = ()) -> ChatMessage:
    """A message as chat templates know it."""
    also: ChatMessage = dict.fromkeys(THOUGHTS, thought) if thought else {}
    return {"role": role, "content": said} | also | ({"tool_calls": list(calls)} if calls else {})


def call(id: str, name: str, arguments: Any) -> ChatMessage:
    """One of an assistant's `tool_calls`."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def merge_same_role(turns: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Neighbours of one role are one turn, a line each; but each result of a tool is its own."""
    merged: list[ChatMessage] = []
    for one in turns:
        if merged and merged[-1]["role"] == one["role"] != "tool":
            one = _joined(merged.pop(), one)
        merged.append(one)
    return merged


def _joined(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    """Where one of them only calls or thinks, there is no line to join."""
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    thoughts = [one["reasoning_content"] for one in (first, second) if "reasoning_content" in one]
    lines = [one["content"] for one in (first, second) if one["content"] or not (calls or thoughts)]
    return turn(first["role"], "\n".join(lines), "\n".join(thoughts), calls)


def checked(
    turns: Sequence[ChatMessage], style: ModelFormat, *, answered: bool, param: str = "messages"
) -> Sequence[ChatMessage]:
    """The turns as a model's template can show them, before an answer or not.

    `param` is the field that they came in. Raises Unprocessable for calls that the template has no place for, a
    result of no call, an answer to a call without result.
    """
    known: set[str] = set()
    for i, one in enumerate(turns):
        calls = one.get("tool_calls", ())
        if calls and not style.shows_tools:
            raise Unprocessable(
                f"`{param}`: this model's chat template has no place for tool calls",
                param=param, code="unsupported_content",
            )  # fmt: skip
        known.update(made["id"] for made in calls)
        if style.shows_tools and (id := one.get("tool_call_id")) is not None and id not in known:
            raise Unprocessable(
                f"`{param}`: the tool call {id!r:.80}, whose result is there, was not made before it",
                param=param, code="out_of_range",
            )  # fmt: skip
        if calls and answered and i + 1 == len(turns):
            raise Unprocessable(f"`{param}`: the tool call at the end has no result", param=param, code="out_of_range")
    match style.tool_format:
        case ToolFormat.LLAMA:
            return _one_by_one(turns)
        case ToolFormat.MISTRAL:
            return [_with_short_ids(one) for one in turns]
    return turns


def _with_short_ids(one: ChatMessage) -> ChatMessage:
    """For templates that take no ids of calls but such of nine letters and digits: others become one."""
    changed = dict(one)
    if calls := one.get("tool_calls"):
        changed["tool_calls"] = [{**made, "id": _short(made["id"])} for made in calls]
    if id := one.get("tool_call_id"):
        changed["tool_call_id"] = _short(id)
    return changed


def _short(id: str) -> str:
    return id if MISTRALS_ID.fullmatch(id) else hashlib.sha256(id.encode(errors="replace")).hexdigest()[:9]


def _one_by_one(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """For templates that show one call a message: several become several, each before its result."""
    shown: list[ChatMessage] = []
    at = 0
    while at < len(turns):
        one, at = turns[at], at + 1
        calls = one.get("tool_calls", ())
        if len(calls) < 2:
            shown.append(one)
            continue
        results = list(takewhile(lambda turn: turn["role"] == "tool", turns[at : at + len(calls)]))
        at += len(results)
        for made in calls:
            own = [result for result in results if result.get("tool_call_id") == made["id"]]
            results = [result for result in results if result not in own]
            shown += [{**one, "tool_calls": [made]}, *own]
        shown += results
    return shown


# the prompt


class Prompt(NamedTuple):
    """A rendered conversation."""

    ids: list[int]
    begins: Reasoning  # where the answer does


async def prompt(
    turns: Sequence[ChatMessage],
    context: ModelContext,
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
    tools = [one.definition for one in offered] or None
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
    return Prompt(ids, context.style.reasoning_within(said) if said else context.style.reasoning_after_prompt(text))


def _opened(
    turns: Sequence[ChatMessage],
    context: ModelContext,
    tools: Sequence[dict[str, Any]] | None,
    kwargs: Mapping[str, Any],
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
