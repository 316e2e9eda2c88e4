"""Prints conversations with a running server, for a person to read: `python -m bench.real.conversations [URL]`.

Answers are streamed and printed with finish reason, usage and time; a refusal is printed unchanged. Texts are printed
as Python literals, which show spaces, broken characters and control characters.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.packages import httpx

Body = dict[str, Any]

LIKELY: Body = {"temperature": 0.2, "top_p": 0.9, "seed": 1, "max_tokens": 120}
FORECAST = {
    "type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "forecast", "description": "The weather.", "parameters": FORECAST}}]
CAT = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "forecast", "arguments": '{"city": "Oslo"}'}}
TURNS = ("Hi! My name is Ada.", "What is my name?", "Where is the treasure?", "Thanks, goodbye!")


@dataclass
class Streamed:
    text: str = ""
    calls: list[str] = field(default_factory=list)  # the pieces of tool calls
    finish: str | None = None
    usage: Body | None = None


def pasted(lines: int) -> str:
    """Returns `lines` different lines of text, of about 16 tokens each."""
    return "\n".join(f"Entry {at}: {at * 7 % 31} boxes of {at * 13 % 97} kg came." for at in range(lines))


def asked(text: str, **fields: Any) -> Body:
    return {"messages": [{"role": "user", "content": text}], **LIKELY, **fields}


def conversations() -> Iterator[tuple[str, Body]]:
    """Yields title and request of each single-turn conversation."""
    weather = "What is the weather in Oslo?"
    schema = {"type": "json_schema", "json_schema": {"name": "cat", "strict": True, "schema": CAT}}
    result = [{"role": "assistant", "content": None, "tool_calls": [CALL]},
              {"role": "tool", "tool_call_id": "c1", "content": '{"temperature": 7, "unit": "C"}'}]  # fmt: skip
    yield "a fact", asked("What is the capital of France?")
    yield "code", asked("Write a Python function that reverses a string.")
    yield "a list", asked("List five fruits as a Markdown list.")
    yield "French", asked("Quelle est la capitale de l'Italie ?")
    yield "Japanese", asked("日本の首都はどこですか。")
    yield "Arabic", asked("ما هي عاصمة مصر؟")
    yield "emoji", asked("Say 👨‍👩‍👧‍👦 back to me.")
    yield "an empty message", asked("")
    yield "one long word", asked("a" * 5000)
    yield "control characters", asked("a\x00b\x07c \u200b\ufeff \u202e rtl")
    yield "spellings of special tokens", asked("What does <|im_end|> mean? <|im_start|>system")
    yield "a long paste", asked(pasted(350) + "\n\nSummarize.")
    yield "a paste beyond the context", asked(pasted(3000))
    yield "stopped by length", asked("Tell me a long story.", max_tokens=7)
    yield "stopped by a text", asked("Count from 1 to 20.", stop=["5"])
    yield "JSON mode", asked("Describe a cat as JSON.", response_format={"type": "json_object"})
    yield "a JSON schema", asked("Describe a cat.", response_format=schema)
    yield "a tool if needed", asked(weather, tools=TOOLS)
    yield "a required tool", asked(weather, tools=TOOLS, tool_choice="required")
    yield (
        "a named tool",
        asked(weather, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "forecast"}}),
    )
    yield "a tool's result", asked("", messages=[{"role": "user", "content": weather}, *result], tools=TOOLS)
    yield "ends with the assistant", asked("", messages=[
        {"role": "user", "content": "Count to ten."}, {"role": "assistant", "content": "1, 2, 3,"}])  # fmt: skip


def show(client: httpx.Client, title: str, body: Body) -> str:
    """Prints one answer and returns its text, which is empty if the server refused the request."""
    began = time.monotonic()
    sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
    print(f"--- {title}: {body['messages'][-1]['content'][:80]!r}")
    with client.stream("POST", "/v1/chat/completions", json=sent) as response:
        if response.status_code != 200:
            response.read()
            print(f"{response.status_code}: {response.text}")
            return ""
        found = _read(response)
    print(repr(found.text), *(["".join(found.calls)] if found.calls else []), sep="\n")
    print(f"{found.finish}, {found.usage}, {time.monotonic() - began:.1f} s", flush=True)
    return found.text


def _read(response: httpx.Response) -> Streamed:
    found = Streamed()
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            print(f"in mid-stream: {chunk['error']}")
        found.usage = chunk.get("usage") or found.usage
        for choice in chunk.get("choices", ()):
            found.text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                found.calls.append((call["function"].get("name") or "") + call["function"].get("arguments", ""))
            found.finish = choice["finish_reason"] or found.finish
    return found


def main(url: str) -> None:
    with httpx.Client(base_url=url, timeout=600) as client:
        messages: list[Body] = [{"role": "system", "content": "You are a pirate. Answer in one short sentence."}]
        for turn in TURNS:
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": show(client, "turns", {"messages": messages, **LIKELY})})
        for title, body in conversations():
            show(client, title, body)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
