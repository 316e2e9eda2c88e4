"""Clients of every kind, all at once, and what each of them received: a complete answer, an error, or nothing.

This module knows the API formats and the official SDKs, and nothing of faults. A kind is a coroutine that returns its
complete answer (text, finish, usage, ids, whatever its API format has) or raises; `send` turns that into an `Outcome`.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import anthropic
import httpx
import openai

from tests.patience import PATIENCE_S

End = Literal["whole", "error", "cut", "lost"]

PROMPTS = ["Once upon a time", "Q: What is the capital of France?\nA:", "Tell me a story about a cat", "Count to ten:"]
_DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 60, "maxItems": 60}
SCHEMA = {"type": "object", "properties": {"digits": _DIGITS}, "required": ["digits"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "dial", "description": "Dials a number.", "parameters": SCHEMA}}
LONG = "The cat sat on the mat and looked at the moon. " * 60  # about 700 tokens


class ServerError(Exception):
    """The server reported an error explicitly."""


class MissingEnd(Exception):
    """The answer stopped without an end: the one thing that must never happen."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`whole`: an answer with its end. `error`: an explicit error. `cut`: a broken connection. `lost`: no end."""

    end: End
    answer: Any = None
    words: str = ""
    pause: float = 0.0  # longest silence of a stream, seconds; 0 for an answer in one piece


@dataclass(slots=True)
class SilenceTimer:
    """Measures the longest silence of a stream."""

    last: float = field(default_factory=time.monotonic)
    pause: float = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        self.pause, self.last = max(self.pause, now - self.last), now


@dataclass(frozen=True, slots=True)
class Clients:
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic


@asynccontextmanager
async def clients(url: str) -> AsyncIterator[Clients]:
    """Opens new connections, so that no earlier fault has broken them."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as chat,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as claude,
    ):
        yield Clients(http, chat, claude)


Kind = Callable[[Clients, dict[str, Any], SilenceTimer], Awaitable[Any]]

# /v1/completions through httpx


async def _whole(c: Clients, body: dict[str, Any], timer: SilenceTimer) -> Any:
    response = await c.http.post("/v1/completions", json=body)
    answer = response.json()
    if response.status_code != 200:
        raise ServerError(f"{response.status_code} {answer['error']}")
    return [_choice(choice) for choice in answer["choices"]], _usage(answer["usage"])


async def _chunks(c: Clients, body: dict[str, Any], timer: SilenceTimer) -> Any:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    choices: dict[int, list[Any]] = {}
    usage, done = None, False
    async for _, data in _events(c, body, timer):
        if data == "[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise ServerError(str(chunk["error"]))
        for choice in chunk["choices"]:
            _merge(choices.setdefault(choice["index"], ["", None, []]), choice)
        usage = chunk.get("usage") or usage
    if not done or usage is None or not all(finish for _, finish, _ in choices.values()):
        raise MissingEnd(f"{choices} {usage} {done}")
    return sorted(choices.items()), _usage(usage)


async def _typed(c: Clients, body: dict[str, Any], timer: SilenceTimer) -> Any:
    ids: list[int] = []
    text, end = "", None
    async for kind, data in _events(c, {**body, "stream_format": "events"}, timer):
        event = json.loads(data)
        if end is not None:
            raise MissingEnd(f"{event} after the end {end}")
        if kind == "error":
            raise ServerError(event["error"])
        if kind == "token":
            ids.append(event["token_id"])
            text += event["token"]
        else:
            end = event["finish_reason"], _usage(event["usage"])
    if end is None:
        raise MissingEnd(text)
    return text, ids, end


async def _events(c: Clients, body: dict[str, Any], timer: SilenceTimer) -> AsyncIterator[tuple[str, str]]:
    async with c.http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise ServerError(f"{response.status_code} {(await response.aread()).decode()}")
        kind = ""
        async for line in response.aiter_lines():
            timer.tick()
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                yield kind, line[6:]


def _merge(into: list[Any], choice: dict[str, Any]) -> None:
    into[0] += choice["text"]
    into[1] = choice["finish_reason"] or into[1]
    if choice.get("logprobs"):
        into[2] += zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True)


def _choice(choice: dict[str, Any]) -> Any:
    return choice["index"], choice["text"], choice["finish_reason"], choice.get("logprobs")


def _usage(usage: Any) -> tuple[int, ...]:
    """Returns the token counts without the number of cached prompt tokens, which is not part of the answer."""
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


# the official SDKs


def _as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Converts the request to a chat request; fields that some SDK versions lack go into `extra_body`."""
    offered = ("temperature", "seed", "ignore_eos", "response_format", "tools", "tool_choice")
    extra = {key: body[key] for key in offered if key in body}
    messages = [{"role": "user", "content": body["prompt"]}]
    return {"model": body["model"], "max_tokens": body["max_tokens"], "messages": messages, "extra_body": extra}


async def _chat(c: Clients, body: dict[str, Any], timer: SilenceTimer) -> Any:
    answer = await c.openai.chat.completions.create(**_as_chat(body), n=2)
    assert answer.usage is not None
    contents = [(choice.message.content, choice.finish_reason) for choice in answer.choices]
    return contents, answer.usage.prompt_tokens, answer.usage.completion_tokens


async def _chat_stream(c: Clients, body: dict[str, Any], timer: SilenceTimer) -> Any:
    text, calls, finish, usage = "", "", None, None
    options: Any = {"include_usage": True}
    async for chunk in await c.openai.chat.completions.create(**_as_chat(body), stream=True, stream_options=options):
        timer.tick()
        for choice in chunk.choices:
            text += choice.delta.content or ""
            calls += "".join(_call(call) for call in choice.delta.tool_calls or ())
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage
    if finish is None or usage is None:
        raise MissingEnd(text)
    return text, calls, finish, usage.prompt_tokens, usage.completion_tokens


def _call(part: Any) -> str:
    """Returns a part of a tool call without the call's id, which is random in each answer."""
    return (part.function.name or "") + (part.function.arguments or "")


async def _responses(c: Clients, body: dict[str, Any], timer: SilenceTimer) -> Any:
    asked = {"model": body["model"], "input": body["prompt"], "max_output_tokens": body["max_tokens"]}
    extra = _as_chat(body)["extra_body"]
    numbers, text, end = [], "", None
    async for event in await c.openai.responses.create(**asked, stream=True, extra_body=extra):
        timer.tick()
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type in ("response.completed", "response.incomplete"):
            end = event.response
    if end is None or end.usage is None or numbers != list(range(len(numbers))) or end.output_text != text:
        raise MissingEnd(f"{text} {end} {numbers[-3:]}")
    return text, end.status, end.usage.input_tokens, end.usage.output_tokens


async def _messages(c: Clients, body: dict[str, Any], timer: SilenceTimer) -> Any:
    return _message(await c.anthropic.messages.create(**_as_chat(body)))


async def _messages_stream(c: Clients, body: dict[str, Any], timer: SilenceTimer) -> Any:
    kinds = []
    async with c.anthropic.messages.stream(**_as_chat(body)) as stream:
        async for event in stream:
            timer.tick()
            kinds.append(event.type)
        if kinds[-1] != "message_stop":
            raise MissingEnd(str(kinds[-3:]))
        return _message(await stream.get_final_message())


def _message(message: anthropic.types.Message) -> Any:
    texts = [block.text for block in message.content if block.type == "text"]
    return texts, message.stop_reason, message.usage.input_tokens, message.usage.output_tokens


# calls of all kinds, mixed

KINDS: list[tuple[Kind, dict[str, Any]]] = [
    (_chunks, {}),
    (_typed, {}),
    (_whole, {"n": 3}),
    (_chat_stream, {}),
    (_chunks, {"logprobs": 3}),
    (_messages_stream, {}),
    (_chat, {}),
    (_chunks, {"stop": ["e the"], "ignore_eos": False}),
    (_typed, {"prompt": LONG}),
    (_messages, {}),
    (_responses, {}),
    (_whole, {"echo": True, "logprobs": 2}),
    (_chunks, {"n": 2, "presence_penalty": 0.5}),
    (_chunks, {"prompt": ["A cat", "A dog", LONG]}),
    (_chat_stream, {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}),
    (_chat_stream, {"tools": [TOOL], "tool_choice": "required"}),
]


@dataclass(frozen=True, slots=True)
class Call:
    kind: Kind
    body: dict[str, Any]


def mixed_calls(streams: int, length: int) -> list[Call]:
    """Requests of every kind in turn, greedy and sampled, with `length` to 2 * `length` tokens."""
    calls = []
    for i in range(streams):
        kind, fields = KINDS[i % len(KINDS)]
        body = {"model": "m", "prompt": PROMPTS[i % len(PROMPTS)], "ignore_eos": True, "seed": i}
        body |= {"max_tokens": length + length * i // streams, "temperature": 0 if i % 3 == 0 else 0.9}
        calls.append(Call(kind, body | fields))
    return calls


def sequences(call: Call) -> int:
    """Returns how many sequences the worker computes for a call."""
    prompt, n = call.body["prompt"], 2 if call.kind is _chat else call.body.get("n", 1)
    return n * (len(prompt) if isinstance(prompt, list) else 1)


async def send(c: Clients, call: Call, patience: float) -> Outcome:
    timer = SilenceTimer()
    try:
        async with asyncio.timeout(patience):
            answer = await call.kind(c, call.body, timer)
    except TimeoutError:
        return Outcome("lost", words=f"no end after {patience:g} s", pause=timer.pause)
    except MissingEnd as error:
        return Outcome("lost", words=f"no end: {error}", pause=timer.pause)
    except Exception as error:
        return Outcome(_end_of(error), words=repr(error), pause=timer.pause)
    return Outcome("whole", answer, pause=timer.pause)


def _end_of(error: Exception) -> End:
    """Classifies an error by class name, because the SDKs pass on errors of their own HTTP clients."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"TransportError", "APIConnectionError"}:
        return "cut"
    return "error" if names & {"ServerError", "APIError"} else "lost"


async def send_all(urls: Sequence[str], calls: Sequence[Call], patience: float = PATIENCE_S) -> list[Outcome]:
    """Sends all requests at the same time, distributed over `urls`."""
    async with AsyncExitStack() as stack:
        each = [await stack.enter_async_context(clients(url)) for url in urls]
        return await asyncio.gather(*(send(each[i % len(each)], call, patience) for i, call in enumerate(calls)))
