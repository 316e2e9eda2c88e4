"""Checks answers to random schemas: complete answers are valid, cut answers can be completed, and no request hangs."""

import json
import random
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jiter
from jsonschema_rs import Draft202012Validator

from tests.e2e.server import Server
from tests.patience import PATIENCE_S
from tests.real.random_schemas import Schema, parameters, schema
from tests.real.report import Row

BUDGETS = (1, 3, 8, 16, 32, 64, 128)
MORE = 256  # most tokens to complete an answer that was cut off
AT_ONCE = 8
TASKS = (
    "Describe a person as JSON.", "Give me an example.", "Invent a product and describe it as JSON.",
    "¿Puedes darme un ejemplo?", "Extract the data: Ada, 36 years, red, ada@example.com, 2024-11-24.",
)  # fmt: skip
Found = tuple[str, str | None]  # how a request ended, and what is wrong with its answer (None: nothing)


def check(server: Server, schemas: int, tools: int, seed: int = 0) -> list[Row]:
    return [
        _row(f"{schemas} JSON schemas", [random.Random(f"{seed}/{n}") for n in range(schemas)], _answer, server),
        _row(f"{tools} forced tool calls", [random.Random(f"{seed}/tool/{n}") for n in range(tools)], _call, server),
    ]


def _row(name: str, draws: list[random.Random], one: Any, server: Server) -> Row:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda draw: _patient(one, server, draw), draws))
    ends = Counter(end for end, _ in found)
    told = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    return Row(name, told, [sentence for _, sentence in found if sentence])


def _patient(one: Any, server: Server, draw: random.Random) -> Found:
    try:
        found: Found = one(server, draw)
    except httpx.TimeoutException:
        return "hung", f"no answer within {PATIENCE_S:g} s"
    return found


def _asked(draw: random.Random, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": draw.choice(TASKS)}], "temperature": draw.choice((0, 0.7, 1, 1.5)),
        "seed": draw.randrange(2**31), "max_tokens": draw.choice(BUDGETS), "return_token_ids": True, **fields,
    }  # fmt: skip


def _answer(server: Server, draw: random.Random) -> Found:
    wanted = schema(draw)
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": wanted}}
    body = _asked(draw, response_format=form)
    text, ids, end = _told(server, body)
    if ids is None:
        return end, f"{json.dumps(wanted)}: {text}"
    if end == "stop":
        return "ended", _problem(wanted, text)
    rest, _, end = _told(
        server, body | _hurried(server) | {"max_tokens": len(ids) + MORE, "continue_from": {"ids": ids}}
    )
    if end == "stop":
        return "cut off, valid when continued", _problem(wanted, text + rest)
    return f"cut off, also after {MORE} more tokens", _unlike_json(text + rest)


def _call(server: Server, draw: random.Random) -> Found:
    offered = {name: parameters(draw) for name in draw.sample(("get_weather", "add", "send-mail", "f"), 2)}
    tools = [
        {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": wanted}}
        for name, wanted in offered.items()
    ]
    named = draw.choice((None, *offered))
    forced: Any = {"type": "function", "function": {"name": named}} if named else "required"
    several = draw.random() < 0.2  # a small model repeats a call until its tokens are used up
    body = _asked(draw, tools=tools, tool_choice=forced, parallel_tool_calls=several, max_tokens=256)
    if draw.random() < 0.5:
        body |= _hurried(server)
    answer = server.client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        return str(answer.status_code), f"{json.dumps(offered)}: {answer.text}"
    (choice,) = answer.json()["choices"]
    end, calls = choice["finish_reason"], choice["message"].get("tool_calls") or []
    if choice["message"]["content"]:
        return end, f"text beside the call: {choice['message']['content']!r}"
    if end == "length":
        return "cut off", None
    if end not in ("tool_calls", "stop") or not calls or (named and len(calls) > 1):
        return end, f"{len(calls)} calls, ended by {end}"
    for call in calls:
        name = call["function"]["name"]
        if name not in offered or (named and name != named):
            return "ended", f"it calls {name!r}"
        if problem := _problem(offered[name], call["function"]["arguments"]):
            return "ended", problem
    return "ended", None


def _hurried(server: Server) -> dict[str, Any]:
    """Returns sampling parameters that close strings, arrays and objects as soon as the schema allows it."""
    closing = [server.client.post("/tokenize", json={"prompt": text}).json()["tokens"][0] for text in '"}]']
    return {"temperature": 0, "logit_bias": {str(id): 50 for id in closing}}


def _unlike_json(text: str) -> str | None:
    """Returns why a text cannot begin a JSON value, or None. Ignores a number or word that is cut off at its end."""
    whole = re.sub(r"[-+.\w]+$", "", text)
    try:
        jiter.from_json(whole.encode() or b"[", partial_mode="trailing-strings")
    except ValueError as error:
        return f"{text!r} begins no JSON: {error}"
    return None


def _told(server: Server, body: dict[str, Any]) -> tuple[str, list[int] | None, str]:
    """Returns (text, ids, finish reason) of an answer, or (body, None, status) of a refusal."""
    answer = server.client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        return answer.text, None, str(answer.status_code)
    (choice,) = answer.json()["choices"]
    return choice["message"]["content"] or "", choice["token_ids"], choice["finish_reason"]


def _problem(wanted: Schema, text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"{json.dumps(wanted)}: {text!r}: {error}"
    errors = [error.message for error in Draft202012Validator(wanted, validate_formats=True).iter_errors(value)]
    return f"{json.dumps(wanted)}: {text!r}: {errors}" if errors else None
