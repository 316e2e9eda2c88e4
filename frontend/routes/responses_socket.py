"""WebSocket mode of /v1/responses: https://developers.openai.com/api/docs/guides/websocket-mode

Each `response.create` is answered as if its body had come in a request of its own (`POST`, `"stream": true`): it goes
through the whole app, so keys, limits, logs, metrics and the bytes of events are those of such a request. What is new
here: requests with the same `stream_id` are answered in order, and a response is followed from memory, also with
`store: false`.

A client may add input to a response while it is generated (`response.steer`). The response is not cut. When it has
ended, it is followed by another one to what was added, with the settings of its request. If it has called tools, their
results are missing: what was added goes in front of them, in the request that brings them.
"""

import asyncio
import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from frontend.api.openai import responses
from frontend.app_state import AppState
from frontend.errors import BadRequest, Overloaded, SluiceError, TooLarge
from frontend.routes.kept import items_until, tenant_of
from frontend.routes.responses_steering import Fields, Steer, SteerError, check_steer, required_input, steer_message
from frontend.schema.base import to_json
from frontend.server.bodies import Entry
from frontend.server.http_protocol import SHUTDOWN, Upgrade
from frontend.server.middleware import CLOSED, DIRECT, RECORD, REQUEST_ID, UPGRADE, client_error
from frontend.server.websocket import (
    GOING_AWAY,
    LATER,
    NORMAL,
    TOO_LARGE,
    VERSION,
    WebSocket,
    accepted_key,
)
from frontend.turns import tenant

LONGEST_S = 3600.0  # of a connection, as at OpenAI
LIMIT = "limit"
MOST_STREAMS, MOST_RUNNING, MOST_WAITING = 32, 16, 32
MOST_STEERS = 16  # of each response
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_KIND = re.compile(rb"event: (\S+)\n")
# Headers of the handshake that say nothing about the requests on the connection.
OF_HANDSHAKE = frozenset({
    b"connection", b"upgrade", b"content-type", b"content-length", b"content-encoding", b"transfer-encoding", b"expect",
    b"x-request-id", b"x-conversation-id", b"last-event-id", b"idempotency-key",
})  # fmt: skip
WITH_RESPONSE = frozenset({  # the events that have the whole response
    b"response.queued", b"response.created", b"response.in_progress", b"response.completed", b"response.incomplete",
    b"response.failed",
})  # fmt: skip
SUCCEEDED = (b"response.completed", b"response.incomplete")
OPENING = (b"response.created", b"response.in_progress")
NOT_FOUND = "previous_response_not_found"
EMPTY_INPUT = b'[{"type":"message","role":"user","content":""}]'
REPORTED_HEADERS = ("x-request-id", "retry-after", "x-should-retry")  # headers of an error that its message has, too


async def connect(app: AppState, request: Request) -> Response:
    """Goes on with the connection as a WebSocket. Raises BadRequest for a wrong key of the handshake."""
    offer: Upgrade | None = request.scope.get(UPGRADE)
    if offer is None or request.scope["http_version"] != "1.1":
        return _upgrade_required(request, f"{request.url.path!r:.80} takes POST, and GET only to open a WebSocket")
    if request.headers.get("sec-websocket-version") != VERSION:
        return _upgrade_required(request, f"`Sec-WebSocket-Version` must be {VERSION}")
    return _Session(app, request, offer, accepted_key(request.headers))


def _upgrade_required(request: Request, message: str) -> Response:
    """Returns the refusal at which Codex asks without a WebSocket, as when a proxy has not passed on its offer."""
    body = responses.error(BadRequest(message, code="upgrade_required"), request.scope[REQUEST_ID])
    headers = {"Upgrade": "websocket", "Sec-WebSocket-Version": VERSION}
    return Response(body, 426, headers, "application/json")


# the connection


@dataclass(eq=False, slots=True)
class _Stream:
    """Requests with the same `stream_id`, which are answered one after the other.

    latest: the response that another one can follow
    turn: what is answered now
    steers: what clients have added to the response of `turn`, or to the latest one, which waits for results of tools
    """

    stream_id: str | None
    waiting: "deque[_Create]" = field(default_factory=deque)
    worker: "asyncio.Task[None] | None" = None
    latest: "_Latest | None" = None
    turn: "_Turn | None" = None
    steers: list[Steer] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Create:
    """A `response.create` that waits for its turn.

    message: a request with it as the body, whose bytes stay counted; None: it was made here, for what was added
    """

    fields: Fields
    message: Request | None

    def follows(self, id: str) -> bool:
        return bytes(self.fields.get("previous_response_id", b"")) == to_json(id)


class _Session(Response):
    """The response that hands a connection over, and serves it as a WebSocket until it is closed."""

    def __init__(self, app: AppState, request: Request, offer: Upgrade, key: str) -> None:
        super().__init__()
        self._app, self._request, self._offer, self._key = app, request, offer, key
        self._streams: dict[str | None, _Stream] = {}
        self._running = asyncio.Semaphore(MOST_RUNNING)
        self._waiting = 0
        self._socket: WebSocket
        self._passed_on = [
            (name, value)
            for name, value in request.scope["headers"]
            if name not in OF_HANDSHAKE and not name.startswith(b"sec-websocket-")
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id: str = scope[REQUEST_ID]
        headers = [(b"sec-websocket-accept", self._key.encode()), (b"x-request-id", id.encode())]
        socket = self._offer.accept(
            headers, lambda transport, flow: WebSocket(transport, flow, lambda: scope.get(CLOSED, ""))
        )
        if socket is None:
            raise BadRequest("nothing may follow the handshake of a WebSocket before its answer", code="bad_handshake")
        scope[RECORD].status, self._socket = 101, socket
        limit = asyncio.get_running_loop().call_later(LONGEST_S, socket.stop, LIMIT)
        try:
            await self._serve()
        finally:
            limit.cancel()
            self._end()
            self._offer.finish()

    async def _serve(self) -> None:
        socket = self._socket
        try:
            while await socket.message():
                await self._take()
                await asyncio.sleep(0)  # other clients have a turn, however many messages have come
        except ClientDisconnect:
            pass
        except (TooLarge, Overloaded) as exc:  # the rest of the message will not be read
            self._refuse(exc)
            socket.close(TOO_LARGE if isinstance(exc, TooLarge) else LATER, exc.message)
        if workers := [stream.worker for stream in self._streams.values() if stream.worker is not None]:
            await asyncio.wait(workers)
        if socket.stopping == LIMIT:
            self._refuse(
                BadRequest(
                    f"a WebSocket is open for at most {LONGEST_S / 60:.0f} minutes: open a new one to go on",
                    code="websocket_connection_limit_reached",
                )
            )
        socket.close(GOING_AWAY if socket.stopping == SHUTDOWN else NORMAL, "")

    def _end(self) -> None:
        for stream in self._streams.values():
            if stream.worker is not None:
                stream.worker.cancel()
            for message in (*[one.message for one in stream.waiting], *[one.message for one in stream.steers]):
                self._release(message)
            if stream.latest is not None:
                self._app.remembered.forget(stream.latest.items)

    # what the client sends

    async def _take(self) -> None:
        """Reads a message, and queues or answers it. Raises TooLarge, Overloaded, ClientDisconnect."""
        message = Request(self._scope(), self._socket.receive)
        held = False
        stream_id: str | None = None
        try:
            fields = _fields(await self._app.body(message))
            kind = _text(fields, "type")
            if kind == "response.create":
                stream_id = _stream_id(fields)
                self._queue(stream_id, _Create(fields, message))
                held = True
            elif kind == "response.steer":
                held = self._steer(fields, message)
            elif kind != "response.processed":  # Codex says so after each response
                raise BadRequest(
                    f"`type` must be response.create, not {kind!r:.80}", param="type", code="unknown_event"
                )
        except BadRequest as exc:
            self._refuse(exc, stream_id)
        finally:
            if not held:
                self._app.bodies.release(message)

    def _release(self, message: Request | None) -> None:
        if message is not None:
            self._app.bodies.release(message)

    def _queue(self, stream_id: str | None, create: _Create) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            if stream_id is not None and len(self._streams.keys() - {None}) >= MOST_STREAMS:
                raise BadRequest(
                    f"`stream_id`: a connection has at most {MOST_STREAMS} of them", param="stream_id",
                    code="websocket_stream_limit_reached",
                )  # fmt: skip
            stream = self._streams[stream_id] = _Stream(stream_id)
        if self._waiting >= MOST_WAITING:
            raise BadRequest(f"at most {MOST_WAITING} requests of a connection may wait", code="queue_full")
        self._waiting += 1
        stream.waiting.append(create)
        if stream.worker is None or stream.worker.done():
            stream.worker = asyncio.create_task(self._work(stream))

    def _refuse(self, exc: SluiceError, stream_id: str | None = None) -> None:
        self._socket.send([_error(responses.status(exc), responses.error(exc, ""), stream_id, {})])

    # what is added to a response

    def _steer(self, fields: Fields, message: Request) -> bool:
        """Answers a `response.steer`. Returns whether it was accepted. Raises BadRequest."""
        previous = _text(fields, "previous_response_id")
        steer = Steer(previous, fields.get("input", msgspec.Raw(b"null")), message)
        stream: _Stream | None = None
        try:
            check_steer(fields)
            stream = self._steered(previous)
        except SteerError as exc:
            self._socket.send([steer_message(steer.failed(exc, accepted=False), None)])
            return False
        stream.steers.append(steer)
        self._socket.send([steer_message(steer.accepted(), stream.stream_id)])
        return True

    def _steered(self, previous: str) -> _Stream:
        """Returns the stream that generates a response. Raises SteerError if nothing can be added to that."""
        streams = self._streams.values()
        stream = next((one for one in streams if one.turn is not None and one.turn.running == previous), None)
        if stream is None or stream.turn is None or not previous:
            if any(one.latest is not None and one.latest.id == previous for one in streams):
                raise SteerError("response_already_completed", f"the response {previous!r:.80} has ended")
            raise SteerError("response_not_found", f"this connection generates no response {previous!r:.80}")
        if not stream.turn.steerable:
            raise SteerError(
                "steering_not_supported",
                "a response of a conversation, one behind a response that this connection does not remember, and one "
                "with `generate: false` cannot be steered",
            )
        if len(stream.steers) >= MOST_STEERS:
            raise SteerError("too_many_pending_steers", f"a response has at most {MOST_STEERS} that wait")
        return stream

    def _take_steers(self, stream: _Stream, fields: Fields) -> list[Steer]:
        """Puts what was added to the response that a request follows in front of its input. Returns that."""
        previous = _text(fields, "previous_response_id")
        steers, stream.steers = stream.steers, []
        if steers and steers[0].previous != previous:
            self._fail(stream, steers, "response_not_active", "another request did not follow the response")
            return []
        given = _items(fields.get("input"))
        if steers and given is not None:
            added = [_items(steer.given) or b"" for steer in steers]
            fields["input"] = msgspec.Raw(b"[%b]" % b",".join(filter(None, [*added, given])))
        return steers

    def _go_on(self, stream: _Stream, turn: "_Turn", settings: Entry) -> None:
        """Goes on with what was added to a response that has ended."""
        if not turn.id or stream.latest is None or stream.latest.id != turn.id or settings.data is None:
            steers, stream.steers = stream.steers, []
            self._fail(stream, steers, "successor_creation_failed", "the response has failed, or is not remembered")
        elif required := required_input(turn.output):
            self._socket.send([steer_message(one.pending(required), stream.stream_id) for one in stream.steers])
        elif not (stream.waiting and stream.waiting[0].follows(turn.id)):
            fields = msgspec.json.decode(settings.data, type=Fields)
            fields |= {"previous_response_id": msgspec.Raw(to_json(turn.id)), "input": msgspec.Raw(b"[]")}
            self._waiting += 1
            stream.waiting.appendleft(_Create(fields, None))

    def _fail(self, stream: _Stream, steers: list[Steer], code: str, why: str) -> None:
        failed = [one.failed(SteerError(code, why), accepted=True) for one in steers]
        self._socket.send([steer_message(one, stream.stream_id) for one in failed])
        for one in steers:
            self._release(one.message)

    # streams

    async def _work(self, stream: _Stream) -> None:
        while stream.waiting and not self._socket.gone.is_set():
            async with self._running:
                create = stream.waiting.popleft()
                self._waiting -= 1
                try:
                    await self._answer(stream, create)
                except Exception as exc:
                    self._refuse(client_error(exc, self._request.scope[REQUEST_ID]), stream.stream_id)
                finally:
                    self._release(create.message)

    async def _answer(self, stream: _Stream, create: _Create) -> None:
        """Answers one request, with what was added to the response that it follows.

        Raises BadRequest and NotFound, which name the field.
        """
        steers = self._take_steers(stream, create.fields)
        try:
            await self._respond(stream, create)
        finally:
            begun, stream.turn = stream.turn is not None and bool(stream.turn.running), None
            if begun:
                for one in steers:
                    self._release(one.message)
            else:
                self._fail(stream, steers, "successor_creation_failed", "the request that follows was refused")

    async def _respond(self, stream: _Stream, create: _Create) -> None:
        earlier = await self._earlier(create.fields)
        try:
            stream.turn = _Turn(stream.stream_id, create.fields, earlier)
            await self._respond_turn(stream, create, stream.turn)
        finally:
            if stream.turn is None or not stream.turn.id:
                self._forget(earlier.id)

    async def _respond_turn(self, stream: _Stream, create: _Create, turn: "_Turn") -> None:
        exchange = _Exchange(self._socket, turn, msgspec.json.encode(create.fields))
        settings = self._app.remembered.keep(tenant.get(), msgspec.json.encode(_settings(create.fields)))
        create.fields.clear()
        self._release(create.message)
        kept = None if turn.items is None else self._app.remembered.keep(tenant.get(), turn.items)
        turn.items = None
        exchange.scope = self._scope({DIRECT: exchange})
        try:
            await self._request.scope["app"](exchange.scope, exchange.receive, exchange.send)
            exchange.end()
            if turn.id and kept is not None and kept.data is not None:
                whole = self._app.remembered.keep(tenant.get(), _joined(kept.data, turn.output))
                if stream.latest is not None:
                    self._app.remembered.forget(stream.latest.items)
                stream.latest = _Latest(turn.id, whole, turn.stored)
        finally:
            if stream.steers:
                self._go_on(stream, turn, settings)
            self._app.remembered.forget(settings)
            if kept is not None:
                self._app.remembered.forget(kept)

    def _forget(self, id: str) -> None:
        """Forgets a response whose next turn has failed, as OpenAI does: a client begins again with its whole input."""
        for stream in self._streams.values():
            if stream.latest is not None and stream.latest.id == id:
                self._app.remembered.forget(stream.latest.items)
                stream.latest = None

    async def _earlier(self, fields: Fields) -> "_Earlier":
        """Returns what a request follows. Raises BadRequest and NotFound if nobody here knows it."""
        previous = _text(fields, "previous_response_id")
        if not previous:
            in_store = bytes(fields.get("conversation", b"null")) != b"null"
            return _Earlier("", None if in_store else b"")
        stores = self._app.kept is not None and bytes(fields.get("store", b"")) != b"false"
        for stream in self._streams.values():
            latest = stream.latest
            if latest is not None and latest.id == previous and latest.items.data is not None:
                return _Earlier(previous, latest.items.data, asked_of_store=stores and latest.stored)
        if self._app.kept is None:
            raise BadRequest(
                f"`previous_response_id`: this connection does not remember the response {previous!r:.80}; send the "
                "whole conversation",
                param="previous_response_id", code=NOT_FOUND,
            )  # fmt: skip
        if stores:
            return _Earlier(previous, None, asked_of_store=True)
        items = await items_until(self._app.kept, previous, tenant_of(self._request))
        return _Earlier(previous, b",".join(map(msgspec.json.encode, items)))

    def _scope(self, more: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the scope of a request on this connection, whose body is a message."""
        scope = self._request.scope
        same = ("asgi", "http_version", "scheme", "path", "raw_path", "root_path", "client", "server", "state")
        return {
            "type": "http", "method": "POST", "query_string": b"",
            "headers": [*self._passed_on, (b"content-type", b"application/json")],
            **{name: scope[name] for name in same if name in scope}, **(more or {}),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Latest:
    """A latest response. items: its input and output, and all before; stored: whether it is in the store"""

    id: str
    items: Entry
    stored: bool


@dataclass(frozen=True, slots=True)
class _Earlier:
    """What a request follows.

    id: the response; "": none
    items: all up to its end, without the brackets of an array; None: only the store knows them
    asked_of_store: whether the route is to put them in front of the request's own
    """

    id: str
    items: bytes | None
    asked_of_store: bool = False


class _Turn:
    """One `response.create`, and what becomes of the events of its response.

    Makes the body of `fields`, and raises BadRequest for what a WebSocket does not have.

    items: the input with all that is before it; None: not known
    steerable: whether a request made here can follow its response
    running: the id of the response, once it has begun
    id, output, stored: of the response, once it has ended well
    """

    def __init__(self, stream_id: str | None, fields: Fields, earlier: _Earlier) -> None:
        for name, only in (("background", b"false"), ("stream", b"true")):
            if bytes(fields.pop(name, msgspec.Raw(b"null"))) not in (b"null", only):
                raise BadRequest(f"`{name}` can only be {only.decode()} here", param=name, code="out_of_range")
        generate = bytes(fields.pop("generate", msgspec.Raw(b"null")))
        if generate not in (b"null", b"true", b"false"):
            raise BadRequest("`generate` must be a boolean", param="generate", code="wrong_type")
        for name in ("type", "stream_id"):
            fields.pop(name, None)
        fields["stream"] = msgspec.Raw(b"true")
        self.id, self.output, self.stored = "", b"", False
        self.stream_id = stream_id
        self._mark = b"" if stream_id is None else b'{"stream_id":%s,' % to_json(stream_id)
        given = _items(fields.get("input"))
        self.items = None if given is None or earlier.items is None else _joined(earlier.items, given)
        self._patch: dict[str, Any] = {}
        if earlier.id and not earlier.asked_of_store:
            del fields["previous_response_id"]
            self._patch["previous_response_id"] = earlier.id
            if earlier.items and self.items is not None:
                fields["input"] = msgspec.Raw(b"[%b]" % self.items)
        self._warms_up = generate == b"false"
        self.running, self.steerable = "", self.items is not None and not self._warms_up
        if self._warms_up:
            self._warm_up(fields)

    def _warm_up(self, fields: Fields) -> None:
        """Asks for one token, which is not shown: the prompt is then in the prefix cache."""
        self._patch["max_output_tokens"] = fields.get("max_output_tokens", msgspec.Raw(b"null"))
        fields["max_output_tokens"] = msgspec.Raw(b"1")
        fields.pop("min_tokens", None)
        fields["store"] = msgspec.Raw(b"false")
        if self.items == b"":
            fields["input"] = msgspec.Raw(EMPTY_INPUT)  # computes only what precedes the conversation in the prompt

    def message(self, block: bytes) -> bytes:
        """Returns the message for an event of the stream; empty: none."""
        head, _, data = block.partition(b"data: ")
        found = _KIND.search(head)
        kind = found[1] if found else b""
        if kind in WITH_RESPONSE:
            data = self._with_response(kind, data)
        elif self._warms_up and kind != b"error":
            return b""
        return self._mark + data[1:] if self._mark else data

    def _with_response(self, kind: bytes, data: bytes) -> bytes:
        event = msgspec.json.decode(data, type=Fields)
        response = msgspec.json.decode(event["response"], type=Fields)
        self.running = self.running or _text(response, "id")
        if kind in SUCCEEDED:
            if self._warms_up:
                _show_no_output(event, response)
            self.id, self.output = _text(response, "id"), _items(response["output"]) or b""
            self.stored = bytes(response["store"]) == b"true"
        if not self._patch and not self._warms_up:
            return data
        event["response"] = msgspec.Raw(msgspec.json.encode(response | self._patch))
        return msgspec.json.encode(event)


class _Exchange:
    """The two ends of a request whose response is sent as messages of a WebSocket. It is also its DirectWriter."""

    def __init__(self, socket: WebSocket, turn: _Turn, body: bytes) -> None:
        self.scope: dict[str, Any] = {}
        self._socket, self._turn = socket, turn
        self._body: bytes | None = body
        self._status, self._headers, self._streams = 500, Headers(), False
        self._rest = b""  # what came behind the last whole event, or the body of an error

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._socket.gone.wait()
        if reason := self._socket.reason():
            self.scope[CLOSED] = reason
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], Headers(raw=message["headers"])
            self._streams = self._headers.get("content-type", "").startswith(responses.FRAMING.media_type)
        else:
            await self._socket.drain()
            self.write(message.get("body", b""))

    def ready(self) -> bool:
        return self._streams and self._socket.ready()

    def write(self, data: bytes) -> None:
        if not self._streams:
            self._rest += data
            return
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        events = [block for block in blocks if not block.startswith(b":")]
        if len(events) < len(blocks):  # a comment is there to keep the connection open
            self._socket.ping()
        self._socket.send(filter(None, map(self._turn.message, events)))

    def cut(self) -> None:
        self._socket.close(GOING_AWAY, "")

    def end(self) -> None:
        """Sends an error that came before the first event. Later errors are events."""
        if self._rest and not self._streams:
            reported = {name: self._headers[name] for name in REPORTED_HEADERS if name in self._headers}
            self._socket.send([_error(self._status, self._rest, self._turn.stream_id, reported)])


def _fields(body: bytes) -> Fields:
    try:
        return msgspec.json.decode(body, type=Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(f"the message is not a JSON object: {exc}", code="malformed_body") from None


def _settings(fields: Fields) -> Fields:
    """Returns the fields of a request that one behind it has, too."""
    return {name: value for name, value in fields.items() if name not in ("input", "previous_response_id")}


def _text(fields: Fields, name: str) -> str:
    """Returns a field that is a text; "" if it is missing or null. Raises BadRequest."""
    try:
        return msgspec.json.decode(fields.get(name, b"null"), type=str | None) or ""
    except msgspec.DecodeError:
        raise BadRequest(f"`{name}` must be a string", param=name, code="wrong_type") from None


def _stream_id(fields: Fields) -> str | None:
    if bytes(fields.get("stream_id", b"null")) == b"null":
        return None
    try:
        found = _text(fields, "stream_id")
    except BadRequest:
        found = ""
    if not _STREAM_ID.fullmatch(found):
        raise BadRequest(
            "`stream_id` must have 1 to 256 of the characters A-Z a-z 0-9 . _ -", param="stream_id",
            code="invalid_stream_id",
        )  # fmt: skip
    return found


def _items(given: msgspec.Raw | None) -> bytes | None:
    """Returns the items of an `input` or `output` without the brackets; None if it is neither a text nor an array."""
    data = b"" if given is None else bytes(given).strip()
    if data.startswith(b'"'):
        return b'{"type":"message","role":"user","content":[{"type":"input_text","text":%b}]}' % data
    return data[1:-1].strip() if data.startswith(b"[") else None


def _joined(first: bytes, second: bytes) -> bytes:
    return b",".join(filter(None, (first, second)))


def _show_no_output(event: Fields, response: Fields) -> None:
    """Makes the end of an answer of one token that of a response without output."""
    event["type"], event["sequence_number"] = msgspec.Raw(b'"response.completed"'), msgspec.Raw(b"%d" % len(OPENING))
    usage: dict[str, Any] = msgspec.json.decode(response["usage"])
    usage |= {"output_tokens": 0, "output_tokens_details": {"reasoning_tokens": 0}}
    usage["total_tokens"] = usage["input_tokens"]
    changed = {
        "status": "completed", "completed_at": int(time.time()), "incomplete_details": None, "output": [],
        "usage": usage,
    }  # fmt: skip
    response |= {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in changed.items()}
    response.pop("receipt", None)


def _error(status: int, body: bytes, stream_id: str | None, headers: dict[str, str]) -> bytes:
    """Returns the message for an error. body: as it is in a response"""
    error = msgspec.json.decode(body)["error"]
    if error["code"] == NOT_FOUND:
        status, error["type"] = BadRequest.status, BadRequest.kind  # as OpenAI has it here
    named = {} if stream_id is None else {"stream_id": stream_id}
    return to_json({"type": "error", "status": status, "error": error, "headers": headers, **named})
