"""Runs the session against one server: one streamed chat request a turn, one turn after another.

What the model answers goes into the history, with the results of its calls, so the prompts of servers that answer alike
are equal. A call is counted as valid if the world could execute it, and as invalid if not. No call is asked for again.
"""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import nan
from typing import Any

from bench.agent.script import EDITED, REPORT, Script, Turn
from bench.agent.world import Call, World, problem
from bench.client.load_client import Target
from bench.client.server import BenchError

Message = dict[str, Any]

TIMEOUT_S = 3600.0  # between two pieces of an answer, the first one's prompt included
BLOCK = re.compile(r"```[a-z]*\n(.*?)```", re.DOTALL)


@dataclass
class Answer:
    """A streamed answer. Times are in seconds after the request was sent; nan: it never happened.

    computed: how many tokens of the prompt the server computed, nan if it does not say
    """

    text: str = ""
    calls: list[Call] = field(default_factory=list)
    first: float = nan
    last: float = nan
    prompt_tokens: int = 0
    tokens: int = 0
    computed: float = nan
    finish: str = ""
    error: str = ""

    @property
    def decode_s(self) -> float:
        """Tokens a second after the first piece; nan if too few came."""
        seconds = self.last - self.first
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else nan


@dataclass
class Turned:
    """One turn's answer, and what the world says about it.

    kept: whether the turn did what it was for: the tool's valid call, the edit as asked, JSON by the schema; None: a
    text that nothing judges
    """

    turn: Turn
    answer: Answer
    valid: int = 0
    invalid: int = 0
    kept: bool | None = None


def run(
    target: Target, script: Script, tool_choice: str = "auto", on_turn: Callable[[Turned], None] = lambda turned: None
) -> list[Turned]:
    """Runs all turns. Raises BenchError if the server cannot be reached; a refused request counts as a failed turn.

    tool_choice: of the turns that ask for a call: `auto`, `required`, or `named`, which names the tool. The latter are
    for models that rarely call by themselves.
    """
    world, results = script.world(), list[Turned]()
    history: list[Message] = [{"role": "system", "content": script.system}]
    for number, turn in enumerate(script.turns):
        for at, path in enumerate(turn.reads):
            history += _read(f"script_{number}_{at}", path, world)
        history.append({"role": "user", "content": turn.asked})
        before = world.files.get(EDITED, "")
        answer = ask(target, _request(turn, history, tool_choice) | {"tools": script.tools})
        turned = Turned(turn, answer)
        history += _executed(turned, number, world)
        turned.kept = _kept(turned, world, before)
        results.append(turned)
        on_turn(turned)
    return results


def _request(turn: Turn, history: list[Message], tool_choice: str) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": turn.tool}}
    asked = named if tool_choice == "named" else tool_choice
    choice = asked if turn.tool else "auto"
    return {
        "messages": history, "tool_choice": choice, "parallel_tool_calls": False,
        "max_tokens": turn.most_tokens, "temperature": 0, "seed": 1, **turn.more,
    }  # fmt: skip


def _read(id: str, path: str, world: World) -> list[Message]:
    """Returns the messages of a call that the script makes: the agent reads a file."""
    call = Call("read_file", json.dumps({"path": path}))
    return [_calling("", [(id, call)]), _result(id, world.execute(call)[0])]


def _executed(turned: Turned, number: int, world: World) -> list[Message]:
    """Executes the calls of an answer. Returns the answer and the results, as the next request repeats them.

    Servers refuse a history with arguments that are no JSON, so such calls are repeated as text.
    """
    answer, results, ids = turned.answer, list[Message](), list[tuple[str, Call]]()
    text = answer.text
    for at, call in enumerate(answer.calls):
        result, valid = world.execute(call)
        turned.valid, turned.invalid = turned.valid + valid, turned.invalid + (not valid)
        if _is_object(call.arguments):
            ids.append((f"call_{number}_{at}", call))
            results.append(_result(ids[-1][0], result))
        else:
            text += f"{call.name} {call.arguments}"
    return [_calling(text or ("" if ids else "(no answer)"), ids), *results]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _calling(text: str, calls: Iterable[tuple[str, Call]]) -> Message:
    listed = [
        {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for id, call in calls
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": listed} if listed else {})


def _result(id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "content": text}


def _kept(turned: Turned, world: World, before: str) -> bool | None:
    turn, answer = turned.turn, turned.answer
    if turn.edited is not None:
        block = BLOCK.search(answer.text)
        written = world.files.get(EDITED, "") if turn.tool else block[1] if block else ""
        return written.strip() == turn.edited(before).strip()
    if turn.tool:
        return turned.valid > 0 and any(call.name == turn.tool for call in answer.calls)
    if turn.more:
        return _is_object(answer.text) and not problem(json.loads(answer.text), REPORT)
    return None


# One request.


def ask(target: Target, fields: dict[str, Any]) -> Answer:
    """Sends a chat request and reads the stream. Raises BenchError if the server cannot be reached."""
    body = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}, **fields, **target.extra}
    body = {name: value for name, value in body.items() if name not in target.without}
    url = target.url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    headers = {"content-type": "application/json", "authorization": "Bearer none"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    answer, start = Answer(), time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            for line in response:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    _take(answer, json.loads(data), time.perf_counter() - start)
    except urllib.error.HTTPError as error:
        answer.error = f"{error.code}: {error.read()[:300].decode(errors='replace')}"
    except (OSError, ValueError) as error:
        raise BenchError(f"{url}: {getattr(error, 'reason', error)}") from error
    return answer


def _take(answer: Answer, event: dict[str, Any], now: float) -> None:
    """Adds one event of the stream to the answer."""
    if error := event.get("error"):
        answer.error = str(error.get("message", error) if isinstance(error, dict) else error)
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        calls = delta.get("tool_calls") or ()
        if delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or calls:
            answer.first = now if answer.first != answer.first else answer.first
            answer.last = now
        answer.text += delta.get("content") or ""
        for call in calls:
            _add_call(answer.calls, call)
        answer.finish = choice.get("finish_reason") or answer.finish
    timings = event.get("timings") or {}
    if usage := event.get("usage"):
        answer.prompt_tokens, answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None:
            answer.computed = answer.prompt_tokens - cached
    if "prompt_n" in timings:  # llama.cpp
        answer.computed = timings["prompt_n"]


def _add_call(calls: list[Call], delta: dict[str, Any]) -> None:
    function, at = delta.get("function") or {}, delta.get("index", len(calls) - 1 if calls else 0)
    while len(calls) <= at:
        calls.append(Call("", ""))
    name, arguments = calls[at].name or function.get("name") or "", calls[at].arguments
    calls[at] = Call(name, arguments + (function.get("arguments") or ""))
