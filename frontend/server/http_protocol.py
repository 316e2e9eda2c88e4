"""One HTTP connection: uvicorn's protocol, with limits on the size, number and time of requests and on unread answers.

Knows bytes, sockets and clocks; nothing of routes or dialects. Times cost a request nothing: one task a process,
`enforce_timeouts`, looks at every connection a few times a second and asks whether it has moved on since.

    idle         no request has begun                  at most `idle_s`, then it is closed
    request      a head or a body is on its way        at most `request_s` in all, then 408
    responding   ours to do                            no limit here
    writing      the client has bytes to take          at most `write_s` without taking any, then it is cut off
"""

import asyncio
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from frontend.server.connection_limits import ConnectionLimits
from frontend.server.middleware import CLOSED, DIRECT
from frontend.server.tls import has_unsent, waits_for_close_notify

UPGRADING = (b"connection", b"upgrade", b"http2-settings")
PIPELINED = 32  # most requests that may wait behind the one that is answered
LINGER_S = 1.0  # for a refused client to read why
CLOSE_NOTIFY_S = 0.05  # between two looks whether a client over TLS has got everything


@dataclass(frozen=True, slots=True)
class EarlyRefusal:
    """Why a request never reached a route."""

    status: int
    kind: str  # as in the OpenAI error object
    code: str  # counted under this name
    message: str


BAD_REQUEST = EarlyRefusal(400, "invalid_request_error", "bad_request", "this is no valid request")
UPGRADE_REFUSED = EarlyRefusal(400, "invalid_request_error", "upgrade", "this server speaks no other protocol")
TOO_MANY_PIPELINED = EarlyRefusal(
    400, "invalid_request_error", "too_many_pipelined", "too many requests at once on one connection"
)
HEAD_TOO_LARGE = EarlyRefusal(
    431, "invalid_request_error", "head_too_large", "the request's line and headers are too large"
)
REQUEST_TIMEOUT = EarlyRefusal(408, "timeout_error", "request_timeout", "the request did not arrive in time")
TOO_MANY_CONNECTIONS = EarlyRefusal(503, "overloaded_error", "too_many_connections", "too many connections; try again")


class RequestRefused(Exception):
    """Raised in a callback of the parser, which then stops."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """`refused(code)` counts; the rest of the arguments are uvicorn's.

    uvicorn calls an exchange on a connection, a request and its answer, a cycle. `self.cycle` is the newest.
    """

    def __init__(self, limits: ConnectionLimits, refused: Callable[[str], None], *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._limits = limits
        self._refused = refused
        self._verdict = BAD_REQUEST  # why the parser stopped
        self._chunk = b""  # what it is reading, behind the last three bytes of the chunk before
        self._heads = 0  # that ended in the chunk
        self._received = 0  # bytes since the last whole head or request
        self._answering: list[Any] = []  # unfinished cycles before the newest, which came pipelined
        self._shut = False  # refused: whatever comes is not read
        self._phase, self._mark, self._since = "", object(), 0.0  # see `look`

    # asyncio calls these

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) < self._limits.connections:
            return super().connection_made(transport)
        self.transport = transport
        self._refuse(TOO_MANY_CONNECTIONS)

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in (*self._answering, *[cycle for cycle, _ in self.pipeline]):
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._shut:
            return
        self._received += len(data)
        self._chunk, self._heads = self._chunk[-3:] + data, 0
        super().data_received(data)
        if self._received > self._limits.header_bytes and self._in_head() and not self._shut:
            self._refuse(HEAD_TOO_LARGE)

    # uvicorn calls these: the server is to end, an answer has ended

    def shutdown(self) -> None:
        super().shutdown()
        self._end_tls()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._end_tls()

    # the parser calls these; what they raise stops it

    def on_headers_complete(self) -> None:
        if self._received > self._limits.header_bytes and self._head_bytes() > self._limits.header_bytes:
            self._stop(HEAD_TOO_LARGE)
        self._heads += 1
        if self.parser.should_upgrade():
            self._stop(UPGRADE_REFUSED)
        self._received = 0
        before = self.cycle
        super().on_headers_complete()
        cast("dict[str, Any]", self.scope)[DIRECT] = DirectWriter(self.cycle)
        if not self.parser.should_keep_alive():
            self.cycle.transport = CloseAfterResponse(self.transport, self._close)  # type: ignore[assignment]
        if self.scope["http_version"] == "1.0":
            self.cycle.transport = Http10Transport(self.cycle.transport)  # type: ignore[assignment]
        if self.pipeline:
            self._answering = [cycle for cycle in (*self._answering, before) if not cycle.response_complete]
            if len(self.pipeline) > PIPELINED:
                self._stop(TOO_MANY_PIPELINED)

    def on_message_complete(self) -> None:
        self._received = 0
        super().on_message_complete()

    def _stop(self, verdict: EarlyRefusal) -> None:
        self._verdict = verdict
        raise RequestRefused

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it when the parser stopped."""
        if self._verdict is UPGRADE_REFUSED and self._heads == 1 and self.parser.get_method() != b"CONNECT":
            self._verdict = BAD_REQUEST
            self._go_on_in_http()
        else:
            self._refuse(self._verdict)

    def _go_on_in_http(self) -> None:
        """Reads a request again without its wish to speak another protocol: the parser would drop its body.

        Java's client, for one, offers HTTP/2 in this way with its first request.
        """
        rest = self._chunk.partition(b"\r\n\r\n")[2]
        words = b" ".join((self.parser.get_method(), self.url, b"HTTP/1.1"))
        lines = [b"%s: %s" % (name, value) for name, value in self.headers if name not in UPGRADING]
        if any(name == b"connection" and b"close" in value.lower() for name, value in self.headers):
            lines.append(b"connection: close")
        self.parser = httptools.HttpRequestParser(self)
        self._received = 0
        super().data_received(b"\r\n".join((words, *lines, b"", b"")) + rest)

    # the watch calls this

    def look(self, now: float) -> None:
        """Ends the connection if it is where it was too long ago."""
        phase, mark = self._state()
        same = mark == self._mark if phase == "writing" else mark is self._mark
        if phase != self._phase or not same:
            self._phase, self._mark, self._since = phase, mark, now
        elif phase == "writing" and now - self._since > self._limits.write_s:
            self._cut_off()
        elif phase == "request" and now - self._since > self._limits.request_s:
            self._refuse(REQUEST_TIMEOUT)
        elif phase == "idle" and now - self._since > self._limits.idle_s:
            self.transport.close()

    def _state(self) -> tuple[str, Any]:
        """The phase, and what changes when the connection moves on within it."""
        buffered = self.transport.get_write_buffer_size()
        if buffered:
            return "writing", buffered
        if self._shut:
            return "shut", None
        if any(not cycle.response_complete for cycle in self._answering):
            return "responding", None
        if self._in_head():
            return "request", self.scope
        if self.cycle is None:
            return "idle", None
        if self.cycle.more_body:
            return "request", self.scope
        return ("idle" if self.cycle.response_complete else "responding"), None

    def _in_head(self) -> bool:
        return self.scope is not None and (self.cycle is None or self.cycle.scope is not self.scope)

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    # ends

    def _end_tls(self) -> None:
        """Closes over TLS without waiting for the client's close_notify, once the client has got everything."""
        if waits_for_close_notify(self.transport):
            self.loop.call_later(CLOSE_NOTIFY_S, self._abort_when_sent)

    def _abort_when_sent(self) -> None:
        if self not in self.connections:
            return
        if has_unsent(self.transport):
            self._end_tls()
        else:
            self.transport.abort()

    def _cut_off(self) -> None:
        self._refused("write_timeout")
        for cycle in (*self._answering, self.cycle):
            if cycle is not None:
                cycle.scope[CLOSED] = "write_timeout"
        self.transport.abort()

    def _refuse(self, why: EarlyRefusal) -> None:
        """Answers with why, unless that would end up in the middle of another answer, and closes."""
        self._shut = True
        self._refused(why.code)
        answering = [cycle for cycle in (*self._answering, self.cycle) if cycle and not cycle.response_complete]
        mute = any(cycle.response_started or not cycle.more_body for cycle in answering)
        for cycle in answering:
            cycle.disconnected = True
            cycle.message_event.set()
        if mute:
            self.transport.close()
            return
        self.transport.write(_answer(why))
        self._linger()

    def _close(self) -> None:
        """After the last answer, which may have come before the end of the request."""
        if self.cycle is not None and self.cycle.more_body:
            self._shut = True
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """A close with bytes unread would take the answer with it."""
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)


class DirectWriter:
    """A way to the socket that never waits: what uvicorn's `send` does with a chunked answer's body, without a task."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle

    def ready(self) -> bool:
        """Whether the client takes what is written now."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (cycle.flow.write_paused or cycle.disconnected)

    def write(self, body: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class CloseAfterResponse:
    """A transport for the last answer of a connection, with a close of its own."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


class Http10Transport:
    """A transport for an answer to HTTP/1.0, which knows no chunks: it ends where the connection does."""

    def __init__(self, transport: asyncio.Transport | CloseAfterResponse) -> None:
        self._transport = transport
        self._chunked: bool | None = None  # until the head is written
        self.close, self.is_closing = transport.close, transport.is_closing

    def write(self, data: bytes) -> None:
        """One write is the head, or one chunk and perhaps the last one."""
        if self._chunked is None:
            head = data.replace(b"transfer-encoding: chunked\r\n", b"")
            self._chunked = head != data
            self._transport.write(head)
        elif not self._chunked:
            self._transport.write(data)
        elif data:
            size, _, rest = data.partition(b"\r\n")
            self._transport.write(rest[: int(size, 16)])


def _answer(why: EarlyRefusal) -> bytes:
    error = {"message": why.message, "type": why.kind, "param": None, "code": why.code}
    body = json.dumps({"error": error}).encode()
    retry = b"retry-after: 1\r\n" if why.status == 503 else b""
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
    return STATUS_LINE[why.status] + head + retry + b"\r\n" + body


async def enforce_timeouts(connections: Collection[Any], limits: ConnectionLimits) -> None:
    """Looks at every `LimitedHttpProtocol` connection of a server, until cancelled."""
    pause = min(1.0, min(limits.request_s, limits.write_s, limits.idle_s) / 4)
    now = asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(pause)
        for connection in list(connections):
            connection.look(now())
