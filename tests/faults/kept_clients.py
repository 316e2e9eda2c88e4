"""Clients of kept answers, and what each of them received: streams with an id, background responses, lines of a batch.

A client comes back until its answer has ended. It counts what came twice, and asks for the whole answer again in the
end. This module knows the API formats, and nothing of faults.
"""

import asyncio
import base64
import io
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.faults.clients import SCHEMA
from tests.images import drawn
from tests.patience import PATIENCE_S

KINDS = ("plain", "grammar", "n", "images", "adapters")
FORMS = ("stream", "background", "batch")
ADAPTER = "tuned"  # the name of the server's adapter
RETRY_S, AWAY_S = 0.1, 1.0
DAMAGED = "damaged in the store"
NOT_KEPT = b": this answer is not kept"
COUNT = 2  # choices of a request with several


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer that is asked for. form: how it is kept; kind: what is special about its request"""

    form: str
    kind: str
    number: int
    tokens: int

    @property
    def id(self) -> str:
        return f"{self.form}-{self.kind}-{self.number}"

    @property
    def path(self) -> str:
        return "/v1/responses" if self.form == "background" else "/v1/chat/completions"

    def body(self) -> dict[str, Any]:
        """Returns the request without the fields that have its answer kept."""
        shared = {
            "model": ADAPTER if self.kind == "adapters" else "m", "temperature": 0.9, "seed": 1000 + self.number,
            "ignore_eos": True,
        }  # fmt: skip
        return shared | (self._response() if self.form == "background" else self._chat())

    def _chat(self) -> dict[str, Any]:
        content: Any = f"Question {self.number}"
        fields: dict[str, Any] = {"max_tokens": self.tokens}
        if self.kind == "images":
            image = {"type": "image_url", "image_url": {"url": _image(self.number)}}
            content = [image, {"type": "text", "text": content}]
        elif self.kind == "grammar":
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        elif self.kind == "n":
            fields["n"] = COUNT
        return {"messages": [{"role": "user", "content": content}], **fields}

    def _response(self) -> dict[str, Any]:
        content: list[Any] = [{"type": "input_text", "text": f"Question {self.number}"}]
        fields: dict[str, Any] = {"max_output_tokens": self.tokens}
        if self.kind == "images":
            content.insert(0, {"type": "input_image", "image_url": _image(self.number)})
        elif self.kind == "grammar":
            fields["text"] = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}
        return {"input": [{"role": "user", "content": content}], **fields}


def _image(seed: int) -> str:
    file = io.BytesIO()
    drawn(50, 30, seed).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def all_asked(copies: int, tokens: int, kinds: Sequence[str] = KINDS) -> list[Asked]:
    """Returns every form of every kind; a response has no choices, so there is no such background answer."""
    return [
        Asked(form, kind, number, tokens)
        for form in FORMS for kind in kinds if (form, kind) != ("background", "n") for number in range(copies)
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Received:
    """How an answer ended.

    end: `whole`, `error` (the server said that the answer is not kept, or that its store cannot be used) or `lost`
    doubled: what came more than once
    """

    end: str
    answer: Any = None
    words: str = ""
    doubled: str = ""


@dataclass(slots=True)
class Visits:
    """Whether clients are there. `begun` counts those that have received something of their answer."""

    number: int = 0
    begun: set[str] = field(default_factory=set)

    def leave(self) -> None:
        """Has all clients close their connections. They come back after AWAY_S."""
        self.number += 1


class KeptClients:
    """All clients of one server.

    give_up: ends the patience of those that only get errors of the store
    forgotten: says that the store was deleted, so that the server knows no answer any more
    """

    def __init__(self, url: str, run: str) -> None:
        """run: is part of all ids, so that no run gets the answers of another one"""
        self._url, self._run = url, run
        self.visits = Visits()
        self.give_up, self.forgotten = asyncio.Event(), asyncio.Event()

    async def receive(self, asked: Sequence[Asked]) -> dict[Asked, Received]:
        lines = [one for one in asked if one.form == "batch"]
        others = [one for one in asked if one.form != "batch"]
        found = await asyncio.gather(self._batch(lines), *map(self._followed, others))
        return found[0] | dict(zip(others, found[1:], strict=True))

    # streams and background responses: both are followed by the events of a stream

    async def _followed(self, asked: Asked) -> Received:
        follow = _Response(asked) if asked.form == "background" else _Stream(asked, f"{self._run}::{asked.id}")
        deadline, words = time.monotonic() + PATIENCE_S, ""
        while time.monotonic() < deadline and not (self.give_up.is_set() and words.startswith("503")):
            visit = self.visits.number
            try:
                async with aclosing(follow.read(self._url)) as pieces:
                    async for _ in pieces:
                        if follow.begun:
                            self.visits.begun.add(asked.id)
                        if self.visits.number != visit:
                            break
                words = ""
            except Refused as exc:
                words = str(exc)
                follow.unkept |= self.forgotten.is_set()
                if exc.status not in (429, 503):
                    said = (exc.status == 404 and follow.unkept) or DAMAGED in words
                    return Received("error" if said else "lost", words=words)
            except httpx.TransportError as exc:
                words = repr(exc)
            if follow.ended:
                follow.unkept |= self.forgotten.is_set()
                return await follow.confirmed(self._url)
            await asyncio.sleep(AWAY_S if self.visits.number != visit else RETRY_S)
        return Received("error" if words.startswith("503") else "lost", words=words or "no end")

    # batches

    async def _batch(self, lines: Sequence[Asked]) -> dict[Asked, Received]:
        if not lines:
            return {}
        data = "".join(json.dumps(_line(one)) + "\n" for one in lines)
        file = await self.asked("POST", "files", files={"file": ("a.jsonl", data)}, data={"purpose": "batch"})
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        try:
            batch = await self.asked("POST", "batches", json=wanted)
            self.visits.begun.add("batch")
            while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
                await asyncio.sleep(RETRY_S)
                batch = await self.asked("GET", f"batches/{batch['id']}")
            outputs = [await self.lines_of(batch[name]) for name in ("output_file_id", "error_file_id")]
        except Refused as exc:
            said = exc.status == 503 or (exc.status == 404 and self.forgotten.is_set())
            return dict.fromkeys(lines, Received("error" if said else "lost", words=str(exc)))
        made = [json.loads(line) for output in outputs for line in output]
        counts = Counter(one["custom_id"] for one in made)
        bodies = {one["custom_id"]: one["response"] for one in made}
        return {one: _line_received(bodies.get(one.id), counts[one.id]) for one in lines}

    async def lines_of(self, file: str | None) -> list[str]:
        """Returns the lines of a file of the server; none if there is no such file."""
        return (await self.asked("GET", f"files/{file}/content", text=True)).splitlines() if file else []

    async def asked(self, method: str, path: str, *, text: bool = False, **more: Any) -> Any:
        """Returns the body of an answer: JSON, or `text`. Asks again while the server is not there. Raises Refused."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            refused = Refused(0, "the server is not there")
            with suppress(httpx.TransportError):
                async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
                    answer = await http.request(method, f"{self._url}/v1/{path}", **more)
                if answer.status_code == 200:
                    return answer.text if text else answer.json()
                refused = Refused(answer.status_code, answer.text)
            if refused.status not in (0, 503) or self.give_up.is_set() or time.monotonic() > deadline:
                raise refused
            await asyncio.sleep(RETRY_S)


class Refused(Exception):
    """The server refused a request."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status} {text[:300]}")
        self.status = status


@dataclass(slots=True)
class _Stream:
    """A stream with an id, of which a client has `data`."""

    asked: Asked
    id: str
    data: bytearray = field(default_factory=bytearray)
    sent: bool = False
    unkept: bool = False  # whether the server has said that it does not keep the answer

    @property
    def begun(self) -> bool:
        return self.data.count(b"data: ") > 1

    @property
    def ended(self) -> bool:
        return self.data.endswith(b"data: [DONE]\n\n") or b'data: {"error"' in self.data

    async def read(self, url: str) -> AsyncIterator[None]:
        """Sends the request, or asks for what follows `data`. Adds to `data`, and yields with each addition."""
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http, self._response(http) as response:
            if response.status_code != 200:
                raise Refused(response.status_code, (await response.aread()).decode())
            self.sent = True
            self.unkept |= "x-sluice-not-kept" in response.headers
            async for piece in response.aiter_raw():
                self.data += piece
                self.unkept |= NOT_KEPT in self.data
                yield

    def _response(self, http: httpx.AsyncClient) -> Any:
        if self.sent:
            return http.stream("GET", "/v1/stream", params={"conv_id": self.id, "from": len(self.data)})
        body = self.asked.body() | {"stream": True, "stream_options": {"include_usage": True}}
        return http.stream("POST", self.asked.path, json=body, headers={"X-Conversation-Id": self.id})

    async def confirmed(self, url: str) -> Received:
        """Returns the answer. It is lost if the server has now kept other bytes than it has sent."""
        if b'data: {"error"' in self.data:
            return Received("error", words=bytes(self.data[-300:]).decode())
        again = await _got(url, "/v1/stream", {"conv_id": self.id, "from": 0})
        if again.status_code == 200 and again.content != self.data and not self.unkept:
            return Received("lost", words=f"kept {again.content[-300:]!r}, sent {bytes(self.data[-300:])!r}")
        numbers = [int(number) for number in re.findall(rb"^id: (\d+)$", self.data, re.MULTILINE)]
        doubled = "" if numbers == list(range(len(numbers))) else f"events {numbers}"
        return Received("whole", _chat_of(_events(bytes(self.data))), doubled=doubled)


@dataclass(slots=True)
class _Response:
    """A response in the background, of whose stream a client has `events`."""

    asked: Asked
    id: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    unkept: bool = False
    last: dict[str, Any] | None = None

    @property
    def begun(self) -> bool:
        return any(event["type"].endswith(".delta") for event in self.events)

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.events[-1]["type"] in (
            "response.completed", "response.incomplete", "response.failed", "response.cancelled", "error",
        )  # fmt: skip

    async def read(self, url: str) -> AsyncIterator[None]:
        """As _Stream's, by the numbers of events."""
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http, self._response(http) as response:
            if response.status_code != 200:
                raise Refused(response.status_code, (await response.aread()).decode())
            rest = b""
            async for piece in response.aiter_raw():
                *blocks, rest = (rest + piece).split(b"\n\n")
                self.unkept |= any(block.startswith(NOT_KEPT) for block in blocks)
                self.events += _events(b"\n\n".join(blocks))
                if self.events and not self.id:
                    self.id = self.events[0]["response"]["id"]
                yield

    def _response(self, http: httpx.AsyncClient) -> Any:
        if self.id:
            after = {"starting_after": self.events[-1]["sequence_number"]} if self.events else {}
            return http.stream("GET", f"/v1/responses/{self.id}", params={"stream": "true", **after})
        body = self.asked.body() | {"stream": True, "background": True}
        return http.stream("POST", self.asked.path, json=body)

    async def confirmed(self, url: str) -> Received:
        """Returns the answer. It is lost if the response that is kept has another text than the events."""
        end = self.events[-1]
        if end["type"] not in ("response.completed", "response.incomplete"):
            return Received("error", words=str(end)[:300])
        again = await _got(url, f"/v1/responses/{self.id}")
        answer = response_answer(end["response"])
        if again.status_code == 200 and response_answer(again.json()) != answer:
            return Received("lost", words=f"kept {again.text[:300]}")
        if DAMAGED in again.text:
            return Received("error", words=again.text[:300])
        if again.status_code not in (200, 503):
            return Received("error" if self.unkept else "lost", words=again.text[:300])
        numbers = [event["sequence_number"] for event in self.events]
        text = "".join(event["delta"] for event in self.events if event["type"] == "response.output_text.delta")
        if text != answer[0]:
            return Received("lost", words=f"deltas {text!r}, response {answer[0]!r}")
        return Received("whole", answer, doubled="" if numbers == list(range(len(numbers))) else f"events {numbers}")


async def _got(url: str, path: str, query: Mapping[str, Any] | None = None) -> httpx.Response:
    """Returns the first response that comes whole."""
    for _ in range(100):
        with suppress(httpx.TransportError):
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
                return await http.get(path, params=query)
        await asyncio.sleep(RETRY_S)
    raise Refused(0, f"{path} never came whole")


def _events(data: bytes) -> list[dict[str, Any]]:
    """Returns the JSON of each event but comments and the end mark."""
    return [json.loads(text) for text in re.findall(rb"^data: (\{.*)$", data, re.MULTILINE)]


def _chat_of(chunks: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the answer of a stream in the form of chat_answer()."""
    texts, ends, usage = Counter[int](), dict[int, Any](), None
    parts: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            parts.setdefault(choice["index"], []).append(choice["delta"].get("content") or "")
            ends[choice["index"]] = choice["finish_reason"] or ends.get(choice["index"])
            texts[choice["index"]] += 1
        usage = chunk.get("usage") or usage
    return [(index, "".join(parts[index]), ends[index]) for index in sorted(parts)], _counts(usage)


def chat_answer(body: Mapping[str, Any]) -> Any:
    """Returns what must be the same of every chat with the same request: texts, finish reasons, token counts."""
    choices = [(one["index"], one["message"]["content"], one["finish_reason"]) for one in body["choices"]]
    return choices, _counts(body["usage"])


def response_answer(body: Mapping[str, Any]) -> Any:
    """Returns what must be the same of every response to the same request: text, status, token counts."""
    parts = [part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]]
    usage = body["usage"] or {}
    return "".join(parts), body["status"], usage.get("input_tokens"), usage.get("output_tokens")


def _counts(usage: Any) -> Any:
    return usage and (usage["prompt_tokens"], usage["completion_tokens"])


def _line(one: Asked) -> dict[str, Any]:
    return {"custom_id": one.id, "method": "POST", "url": one.path, "body": one.body()}


def _line_received(response: Any, count: int) -> Received:
    if not count:
        return Received("lost", words="no line in the output")
    doubled = f"{count} lines" if count > 1 else ""
    if response is None or response["status_code"] != 200:
        return Received("lost", words=str(response)[:300], doubled=doubled)
    return Received("whole", chat_answer(response["body"]), doubled=doubled)


async def undisturbed(url: str, asked: Sequence[Asked]) -> dict[Asked, Any]:
    """Returns the answers of plain requests, of which nothing is kept."""

    async def one(request: Asked) -> Any:
        body = request.body() | ({"store": False} if request.form == "background" else {})
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            while (answer := await http.post(request.path, json=body)).status_code == 503:
                await asyncio.sleep(RETRY_S)  # it is overloaded: a machine may be slow
        assert answer.status_code == 200, answer.text
        return (response_answer if request.form == "background" else chat_answer)(answer.json())

    return dict(zip(asked, await asyncio.gather(*map(one, asked)), strict=True))
