"""The input items of OpenAI's responses, read as turns of a conversation.

What the assistant thought, said and called in one turn comes as several items; `neighbours` joins them again.
"""

from collections.abc import Callable, Mapping
from typing import Any

from frontend.api.chat_prompt import MAX_MESSAGES, MAX_PARTS, ROLES, ChatMessage, call, content, parsed, turn
from frontend.api.fields import (
    Field,
    Reader,
    Table,
    anything,
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
from frontend.errors import BadRequest

text = content(
    "input_text", "output_text", annotations=anything, logprobs=anything, prompt_cache_breakpoint=anything,
    parsed=anything,
)  # fmt: skip
result = content("input_text", empty=True, prompt_cache_breakpoint=anything)
status = choice("in_progress", "completed", "incomplete")
_COMMON: Table = {"id": Field(exactly(str)), "status": Field(status)}


def _thoughts(kind: str) -> Reader:
    """Parts of a thought; there may be none."""
    part = record({"type": Field(choice(kind), required=True), "text": Field(exactly(str), required=True)})
    parts = each(part, MAX_PARTS, empty=True)

    @reads(parts.schema)
    def reader(name: str, value: Any) -> str:
        return "".join(part["text"] for part in parts(name, value))

    return reader


ITEMS: Mapping[str, Table] = {
    "message": {
        "type": Field(choice("message"), "message"),
        "role": Field(choice("user", "assistant", "system", "developer"), required=True),
        "content": Field(text, required=True),
        "phase": Field(choice("commentary", "final_answer")),
    },
    "function_call": {
        "type": Field(choice("function_call"), required=True),
        "call_id": Field(some_text, required=True),
        "name": Field(some_text, required=True),
        "arguments": Field(exactly(str), ""),
        "parsed_arguments": Field(anything),  # the SDK's own
        "async": Field(only(False)),
        "caller": Field(only({"type": "direct"})),
    },
    "function_call_output": {
        "type": Field(choice("function_call_output"), required=True),
        "call_id": Field(some_text, required=True),
        "output": Field(result, required=True),
        "name": Field(some_text),
        "caller": Field(only({"type": "direct"})),
    },
    "reasoning": {
        "type": Field(choice("reasoning"), required=True),
        "summary": Field(_thoughts("summary_text"), ""),
        "content": Field(_thoughts("reasoning_text"), ""),
        "encrypted_content": Field(exactly(str)),  # whose words nobody here can read
    },
}  # fmt: skip
_TABLES: Mapping[str, Table] = {kind: {**table, **_COMMON} for kind, table in ITEMS.items()}


@reads({"anyOf": [schema(table) for table in _TABLES.values()]})
def item(name: str, value: Any) -> ChatMessage:
    if type(value) is not dict:
        raise wrong_type(name, value, "an object")
    kind = value.get("type")
    if type(kind) is str and kind not in _TABLES:
        raise unknown_type(name, kind, f"one of {', '.join(_TABLES)}")
    said = read(_TABLES[kind if type(kind) is str else "message"], value, f"{name}.")
    return _TURNS[said["type"]](said)


_TURNS: Mapping[str, Callable[[Mapping[str, Any]], ChatMessage]] = {
    "message": lambda said: turn(ROLES.get(said["role"], said["role"]), said["content"]),
    "function_call": lambda said: turn(
        "assistant", "", calls=[call(said["call_id"], said["name"], parsed(said["arguments"] or "{}"))]
    ),
    "function_call_output": lambda said: turn("tool", said["output"]) | {"tool_call_id": said["call_id"]},
    "reasoning": lambda said: turn("assistant", "", said["content"] or said["summary"]),
}
_items = each(item, MAX_MESSAGES)


@reads({"anyOf": [{"type": "string", "minLength": 1}, _items.schema]})
def given(name: str, value: Any) -> tuple[ChatMessage, ...]:
    """A user's text, or items."""
    if value == "":
        raise BadRequest(f"`{name}` is empty", param=name, code="empty_prompt")
    if type(value) is not str and type(value) is not list:
        raise wrong_type(name, value, "a string or an array of items")
    return (turn("user", value),) if type(value) is str else _items(name, value)
