"""Messages as chat templates know them: what is in one, and which may follow which. Knows no dialect."""

import hashlib
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from frontend.errors import Unprocessable
from frontend.speech.style import Format, Style

Turn = dict[str, Any]  # role, content (a text), and what else a template may use of a message

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # what templates call a thought
MISTRALS_ID = re.compile(r"[A-Za-z0-9]{9}")


def turn(role: str, said: str, thought: str | None = None, calls: Sequence[Turn] = ()) -> Turn:
    """A message as chat templates know it."""
    also: Turn = dict.fromkeys(THOUGHTS, thought) if thought else {}
    return {"role": role, "content": said} | also | ({"tool_calls": list(calls)} if calls else {})


def call(id: str, name: str, arguments: Any) -> Turn:
    """One of an assistant's `tool_calls`."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def checked(turns: Sequence[Turn], style: Style, *, answered: bool, param: str = "messages") -> Sequence[Turn]:
    """The turns as a model's template can show them, before an answer or not.

    `param` is the field that they came in. Raises Unprocessable for calls that the template has no place for, a
    result of no call, an answer to a call without result.
    """
    known: set[str] = set()
    for i, one in enumerate(turns):
        calls = one.get("tool_calls", ())
        if calls and not style.tools:
            raise Unprocessable(
                f"`{param}`: this model's chat template has no place for tool calls",
                param=param, code="unsupported_content",
            )  # fmt: skip
        known.update(each["id"] for each in calls)
        if style.tools and (id := one.get("tool_call_id")) is not None and id not in known:
            raise Unprocessable(
                f"`{param}`: the tool call {id!r:.80}, whose result is there, was not made before it",
                param=param, code="out_of_range",
            )  # fmt: skip
        if calls and answered and i + 1 == len(turns):
            raise Unprocessable(f"`{param}`: the tool call at the end has no result", param=param, code="out_of_range")
    match style.calls:
        case Format.LLAMA:
            return _one_by_one(turns)
        case Format.MISTRAL:
            return [_with_short_ids(one) for one in turns]
    return turns


def _with_short_ids(one: Turn) -> Turn:
    """For templates that take no ids of calls but such of nine letters and digits: others become one."""
    changed = dict(one)
    if calls := one.get("tool_calls"):
        changed["tool_calls"] = [{**each, "id": _short(each["id"])} for each in calls]
    if id := one.get("tool_call_id"):
        changed["tool_call_id"] = _short(id)
    return changed


def _short(id: str) -> str:
    return id if MISTRALS_ID.fullmatch(id) else hashlib.sha256(id.encode(errors="replace")).hexdigest()[:9]


def _one_by_one(turns: Sequence[Turn]) -> list[Turn]:
    """For templates that show one call a message: several become several, each before its result."""
    shown: list[Turn] = []
    at = 0
    while at < len(turns):
        one, at = turns[at], at + 1
        calls = one.get("tool_calls", ())
        if len(calls) < 2:
            shown.append(one)
            continue
        results = list(takewhile(lambda turn: turn["role"] == "tool", turns[at : at + len(calls)]))
        at += len(results)
        for each in calls:
            own = [result for result in results if result.get("tool_call_id") == each["id"]]
            results = [result for result in results if result not in own]
            shown += [{**one, "tool_calls": [each]}, *own]
        shown += results
    return shown
