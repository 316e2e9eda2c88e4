"""Chat messages as a chat template expects them. Tool calls take the form that the template can show.

Templates differ in what they can show. Some show one call per message, ids of a certain form, or arguments as text.
Some show no calls at all.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any

from frontend.errors import Unprocessable
from frontend.output_parser.model_format import ModelFormat, ToolFormat
from frontend.output_parser.tool_syntax import call_text, json_text, result_text
from frontend.text.chat_template import IMAGE_SOURCES

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # the names that templates use for the reasoning of a message
COMMON_ROLES = frozenset({"system", "user", "assistant", "tool"})  # some templates know more roles
MISTRALS_ID = re.compile(r"[A-Za-z0-9]{9}")

ChatMessage = dict[str, Any]  # a message with `role`, `content` (a text) and further fields that a template may use


def chat_message(role: str, content: str, thought: str | None = None, calls: Sequence[ChatMessage] = ()) -> ChatMessage:
    """Returns a message as chat templates expect it."""
    also: ChatMessage = dict.fromkeys(THOUGHTS, thought) if thought else {}
    return {"role": role, "content": content} | also | ({"tool_calls": list(calls)} if calls else {})


def call(id: str, name: str, arguments: Any) -> ChatMessage:
    """Returns one entry of an assistant message's `tool_calls`."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def left_open(messages: Sequence[ChatMessage], generate: bool | None = None) -> bool:
    """Whether the conversation ends with a text of the assistant that the answer shall continue, as in llama.cpp.

    generate: whether the client asks for a new assistant turn; None if the client does not say. A text is
    continued only if `generate` is None.

    Raises Unprocessable if the last two messages are the assistant's, because an answer cannot continue both.
    """
    if generate is not None or not messages or messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]:
        return False
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise Unprocessable(
            "`messages`: two assistant messages at the end cannot be continued; set `add_generation_prompt` to have "
            "them answered", param="messages", code="out_of_range",
        )  # fmt: skip
    return bool(messages[-1]["content"])


def merge_same_role(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Joins adjacent messages of the same role with a line break. Each tool result stays a message of its own."""
    merged: list[ChatMessage] = []
    for role, run in groupby(messages, itemgetter("role")):
        several = list(run)
        merged += several if role == "tool" or len(several) == 1 else [_merged(role, several)]
    return merged


def _merged(role: str, several: Sequence[ChatMessage]) -> ChatMessage:
    """Joins messages of the same role. Empty texts are left out once a message has had tool calls or reasoning."""
    calls: list[ChatMessage] = []
    thoughts: list[str] = []
    lines: list[str] = []
    for one in several:
        calls += one.get("tool_calls", ())
        thoughts += [one["reasoning_content"]] if "reasoning_content" in one else []
        if (calls or thoughts) and lines == [""]:
            lines = []
        if one["content"] or not (calls or thoughts):
            lines.append(one["content"])
    sources = {mark: source for one in several for mark, source in one.get(IMAGE_SOURCES, {}).items()}
    shown = {IMAGE_SOURCES: sources} if sources else {}
    return chat_message(role, "\n".join(lines), "\n".join(thoughts), calls) | shown


def with_alternating_roles(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Returns the messages for a template that accepts a system message only at the beginning, and each role only
    after another: later system messages are users', and neighbours of one role are one message."""
    users = [one | {"role": "user"} if i and one["role"] == "system" else one for i, one in enumerate(messages)]
    return merge_same_role(users)


def as_the_template_shows(messages: Sequence[ChatMessage], style: ModelFormat) -> Sequence[ChatMessage]:
    """Returns the messages in the form that the model's template can show."""
    messages = _with_ordered_results(messages)
    if style.calls_as_text:
        return merge_same_role(map(_as_text, messages))
    if style.arguments_as_text:
        messages = [_with_text_arguments(one) for one in messages]
    match style.tool_format:
        case ToolFormat.LLAMA:
            return _one_by_one(messages)
        case ToolFormat.MISTRAL | ToolFormat.MISTRAL_ARGS:
            return [_with_short_ids(one) for one in messages]
        case ToolFormat.KIMI:
            return _with_numbered_ids(messages)
        case ToolFormat.GLM4:
            return [_as_observation(one) for one in _one_by_one(messages)]
        case ToolFormat.HARMONY:
            return _for_channels(messages)
    return messages


def _with_ordered_results(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Sorts the results of several calls into the order of the calls.

    Most templates show a result without its id, so the model assigns results to calls by their order.
    """
    ordered = list(messages)
    for begin, one in enumerate(messages):
        if len(calls := one.get("tool_calls", ())) < 2:
            continue
        rank = {call["id"]: number for number, call in enumerate(calls)}
        turns = takewhile(lambda i: messages[i]["role"] != "assistant", range(begin + 1, len(messages)))
        places = [i for i in turns if messages[i]["role"] == "tool" and messages[i].get("tool_call_id") in rank]
        results = sorted([messages[i] for i in places], key=lambda result: rank[result["tool_call_id"]])
        for place, result in zip(places, results, strict=True):
            ordered[place] = result
    return ordered


def _as_text(one: ChatMessage) -> ChatMessage:
    """Returns the message with its calls, or with the result of a call, written into its text."""
    if one["role"] == "tool":
        return chat_message("user", result_text(one["content"]))
    lines = [one["content"]] * bool(one["content"])
    lines += [call_text(**call["function"]) for call in one.get("tool_calls", ())]
    return {key: value for key, value in one.items() if key != "tool_calls"} | {"content": "\n".join(lines)}


def _with_text_arguments(one: ChatMessage) -> ChatMessage:
    if not (calls := one.get("tool_calls")):
        return one
    return one | {"tool_calls": [_changed(call, arguments=json_text(call["function"]["arguments"])) for call in calls]}


def _changed(call: ChatMessage, **more: Any) -> ChatMessage:
    return call | {"function": call["function"] | more}


def _with_numbered_ids(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Replaces the call ids by ids as Kimi's models make them and its template shows them: functions.NAME:NUMBER."""
    ids: dict[str, str] = {}
    for one in messages:
        for call in one.get("tool_calls", ()):
            ids.setdefault(call["id"], f"functions.{call['function']['name']}:{len(ids)}")
    return [_with_ids(one, ids) for one in messages]


def _with_ids(one: ChatMessage, ids: dict[str, str]) -> ChatMessage:
    changed = dict(one)
    if calls := one.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": ids[call["id"]]} for call in calls]
    if id := one.get("tool_call_id"):
        changed["tool_call_id"] = ids.get(id, id)
    return changed


def _as_observation(one: ChatMessage) -> ChatMessage:
    """Returns a message for GLM-4's template, which shows a call's name as `metadata`, a result as an observation."""
    if one["role"] == "tool":
        return {"role": "observation", "content": one["content"]}
    if not (calls := one.get("tool_calls")):
        return one
    function = calls[0]["function"]
    return {"role": one["role"], "content": json_text(function["arguments"]), "metadata": function["name"]}


def _with_short_ids(one: ChatMessage) -> ChatMessage:
    """Replaces a call id that is not nine letters and digits by a digest, because Mistral's templates refuse it."""
    changed = dict(one)
    if calls := one.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short(call["id"])} for call in calls]
    if id := one.get("tool_call_id"):
        changed["tool_call_id"] = _short(id)
    return changed


def _short(id: str) -> str:
    return id if MISTRALS_ID.fullmatch(id) else hashlib.sha256(id.encode(errors="replace")).hexdigest()[:9]


def _one_by_one(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Splits a message with several calls into one message per call, each followed by its results, because Llama's
    templates show one call per message."""
    split: list[ChatMessage] = []
    position = 0
    while position < len(messages):
        one, position = messages[position], position + 1
        calls = one.get("tool_calls", ())
        if len(calls) < 2:
            split.append(one)
            continue
        results = list(takewhile(lambda message: message["role"] == "tool", messages[position : position + len(calls)]))
        position += len(results)
        own_results = _by_call(results)
        for call in calls:
            split += [{**one, "tool_calls": [call]}, *own_results.pop(call["id"], ())]
            one = {"role": one["role"], "content": ""}  # the text and the reasoning go with the first call only
        split += [result for result in results if result.get("tool_call_id") in own_results]
    return split


def _by_call(results: Iterable[ChatMessage]) -> dict[str | None, list[ChatMessage]]:
    """Returns the results by call id. The results of one call keep their order."""
    split: dict[str | None, list[ChatMessage]] = {}
    for result in results:
        split.setdefault(result.get("tool_call_id"), []).append(result)
    return split


def _for_channels(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Returns the messages for gpt-oss's template.

    The template shows only one system message, at the beginning, so later ones become user messages. It shows only the
    first call of a message, so calls are split up. Beside a call it shows either the text or the reasoning, so the text
    is appended to the reasoning.
    """
    lead = list(takewhile(lambda one: one["role"] == "system", messages))
    rest = [one | {"role": "user"} if one["role"] == "system" else one for one in messages[len(lead) :]]
    return [*merge_same_role(lead), *_one_by_one([_text_as_thought(one) for one in rest])]


def _text_as_thought(one: ChatMessage) -> ChatMessage:
    if not (one.get("tool_calls") and one["content"] and "thinking" in one):
        return one
    return chat_message(one["role"], "", f"{one['thinking']}\n{one['content']}", one["tool_calls"])
