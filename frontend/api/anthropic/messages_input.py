"""Anthropic's messages and their content blocks, read as turns of a conversation.

A message may become several turns: each result of a tool is a turn of its own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from frontend.api.chat_prompt import MAX_PARTS, ChatMessage, call, content, turn
from frontend.api.fields import (
    Field,
    Reader,
    Table,
    anything,
    boolean,
    choice,
    each,
    exactly,
    only,
    read,
    reads,
    record,
    schema,
    some_text,
    unknown_type,
    wrong_type,
)

text = content(empty=True, cache_control=anything, citations=only([]))
_SHOWN = {"cache_control": Field(anything)}

BLOCKS: Mapping[str, Table] = {
    "text": {"text": Field(exactly(str), required=True), "citations": Field(only([])), **_SHOWN},
    "tool_use": {
        "id": Field(some_text, required=True),
        "name": Field(some_text, required=True),
        "input": Field(exactly(dict), required=True),
        "caller": Field(anything),
        **_SHOWN,
    },
    "thinking": {"thinking": Field(exactly(str), required=True), "signature": Field(exactly(str))},
    "redacted_thinking": {"data": Field(exactly(str), required=True)},  # whose words nobody here can read
    "tool_result": {
        "tool_use_id": Field(some_text, required=True),
        "content": Field(text, ""),
        "is_error": Field(boolean, False),
        **_SHOWN,
    },
}
ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}


def _blocks(kinds: Sequence[str]) -> Reader:
    """A text, or an array of blocks of these kinds; always blocks afterwards."""
    readers = {
        kind: record({"type": Field(choice(kind), required=True), "parsed_output": Field(anything), **BLOCKS[kind]})
        for kind in kinds
    }

    @reads({"anyOf": [reader.schema for reader in readers.values()]})
    def block(name: str, value: Any) -> Any:
        kind = value.get("type") if type(value) is dict else None
        if type(kind) is str and kind not in readers:
            raise unknown_type(name, kind, f"one of {', '.join(readers)} here")
        return readers[kind if type(kind) is str else "text"](name, value)

    blocks = each(block, MAX_PARTS)

    @reads({"anyOf": [{"type": "string"}, blocks.schema]})
    def reader(name: str, value: Any) -> Any:
        if type(value) is str:
            return ({"type": "text", "text": value},)
        if type(value) is not list:
            raise wrong_type(name, value, "a string or an array of content blocks")
        return blocks(name, value)

    return reader


_messages: Mapping[str, Table] = {
    role: {"role": Field(choice(*ROLES), required=True), "content": Field(_blocks(kinds), required=True)}
    for role, kinds in ROLES.items()
}


@reads({"anyOf": [
    {**schema(table), "properties": {**schema(table)["properties"], "role": {"const": role}}}
    for role, table in _messages.items()
]})  # fmt: skip
def message(name: str, value: Any) -> list[ChatMessage]:
    if type(value) is not dict:
        raise wrong_type(name, value, "an object")
    role = value.get("role")
    table = _messages[role if type(role) is str and role in _messages else "user"]
    said = read(table, value, f"{name}.")
    return SPEAKERS[said["role"]](said["content"])


def _assistants(blocks: Iterable[dict[str, Any]]) -> list[ChatMessage]:
    """One turn: all texts, all thoughts and all calls of the message, as templates want them."""
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block["type"]:
            case "text":
                texts.append(block["text"])
            case "thinking":
                thoughts.append(block["thinking"])
            case "tool_use":
                calls.append(call(block["id"], block["name"], block["input"]))
    return [turn("assistant", "".join(texts), "\n".join(thoughts), calls)]


def _users(blocks: Iterable[dict[str, Any]]) -> list[ChatMessage]:
    """A turn for each tool result, and one for each run of texts between them."""
    turns: list[ChatMessage] = []
    for block in blocks:
        if block["type"] == "tool_result":
            result = f"Error: {block['content']}" if block["is_error"] else block["content"]
            turns.append(turn("tool", result) | {"tool_call_id": block["tool_use_id"]})
        elif turns and turns[-1]["role"] == "user":
            turns[-1]["content"] += block["text"]
        else:
            turns.append(turn("user", block["text"]))
    return turns


def _systems(blocks: Iterable[dict[str, Any]]) -> list[ChatMessage]:
    return [turn("system", "".join([block["text"] for block in blocks]))]


SPEAKERS: Mapping[str, Callable[[Iterable[dict[str, Any]]], list[ChatMessage]]] = {
    "user": _users,
    "assistant": _assistants,
    "system": _systems,
}


def marked(body: Mapping[str, Any]) -> bool:
    """Whether a body that was read has a `cache_control` somewhere."""
    several = (body.get("tools"), body.get("system"), *[message["content"] for message in body["messages"]])
    blocks = [body, *chain.from_iterable(one for one in several if type(one) is list)]
    return any(block.get("cache_control") is not None for block in blocks)


def later_systems_as_users(turns: Iterable[ChatMessage]) -> list[ChatMessage]:
    return [one | {"role": "user"} if i and one["role"] == "system" else one for i, one in enumerate(turns)]
