"""One HTTP connection: uvicorn's protocol, with limits on requests' size, number and time, and on unread responses.

Knows bytes, sockets and clocks, but no routes and no API formats. Timeouts need no timer for each request: one task per
process, `enforce_timeouts`, checks a few times a second whether each connection has made progress.

    idle         no request has begun                  at most `idle_s`, then the connection is closed
    request      a head or a body is arriving          at most `request_s` in all, then 408; a body for which the route
                                                       sets RECEIVED: for each step
    responding   the server computes                   no limit here
    writing      the client has bytes to read          at most `write_s` without reading any, then it is cut off

A client may send no more after a complete request (it half-closes the connection) and still gets its response. One that
has closed the connection looks the same until something is written to it, so that an interim response is sent, which
clients skip. The host of a client that is gone refuses it, and the request is aborted. HTTP/1.0 has no interim
responses, and TLS no half-closed connections: there, the end of the input is the end of the client.

A connection may go on as a WebSocket (websocket.py): a route accepts what the client has offered (`Upgrade`). All other
offers of another protocol are ignored.
"""

import asyncio
import contextlib
import json
import logging
import resource
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from frontend.server.http_compat import (
    PROBE,
    Http10Transport,
    abort_after_tls_close,
    abort_when_gone,
    head_without_upgrade,
    offers_websocket,
)
from frontend.server.middleware import CLOSED, DIRECT, RECEIVED, UPGRADE, DirectWriter
from shared.config.declaration import ConfigError
from shared.config.frontend import FrontendConfig

log = logging.getLogger("sluice.frontend")
OTHER_FILES = 64  # open files that a frontend needs in addition to its connections


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits. FrontendConfig describes the settings of the same names. Sizes are in bytes, times in seconds."""

    connections: int = 10_000
    header_bytes: int = 64 << 10
    request_s: float = 60.0
    write_s: float = 60.0
    idle_s: float = 75.0

    @classmethod
    def of(cls, config: FrontendConfig) -> "ConnectionLimits":
        """Makes the limits from the settings. Allows fewer connections if the system's limit on open files is lower."""
        connections = available_connections(config.max_connections)
        if connections < config.max_connections:
            log.warning(
                "--max-connections %d needs more open files than the system allows (ulimit -n); using %d",
                config.max_connections, connections,
            )  # fmt: skip
        return cls(
            connections, config.max_header_bytes, config.request_timeout, config.write_timeout, config.idle_timeout
        )


def available_connections(connections: int) -> int:
    """Raises the limit on open files as far as allowed, and returns how many of `connections` it then permits.

    Raises ConfigError if it permits no connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or limit - OTHER_FILES >= connections:
        return connections
    if limit <= OTHER_FILES:
        raise ConfigError(f"--max-connections {connections}: the system allows only {limit} open files (ulimit -n)")
    return limit - OTHER_FILES


MAX_PIPELINED = 32  # how many requests of one connection may wait for the current one
VERSIONS = ("1.0", "1.1")
MAX_HEADERS = 500  # how many headers one request may have
CHUNK_SIZE_BYTES = 16  # bytes of a chunk's size line that no limit counts; a line with an extension is longer
SHUTDOWN = "shutdown"  # why a WebSocket reads no more
LINGER_S = 1.0  # how long a refused client can read the reason


@dataclass(frozen=True, slots=True)
class EarlyRefusal:
    """The response to a request that is refused before it reaches a route."""

    status: int
    kind: str  # the `type` of the OpenAI error object
    code: str  # the `code` of the error object, and the label of the counter of refusals
    message: str


BAD_REQUEST = EarlyRefusal(400, "invalid_request_error", "bad_request", "the request is not valid HTTP")
BAD_HOST = EarlyRefusal(400, "invalid_request_error", "bad_host", "the request needs exactly one Host header")
BAD_CODING = EarlyRefusal(
    501, "invalid_request_error", "transfer_coding", "the only Transfer-Encoding that this server reads is chunked"
)
UPGRADE_REFUSED = EarlyRefusal(400, "invalid_request_error", "upgrade", "this server speaks no protocol but HTTP")
TOO_MANY_PIPELINED = EarlyRefusal(
    400, "invalid_request_error", "too_many_pipelined", "too many pipelined requests on one connection"
)
HEAD_TOO_LARGE = EarlyRefusal(
    431, "invalid_request_error", "head_too_large", "the request line, headers or trailers are too large"
)
REQUEST_TIMEOUT = EarlyRefusal(408, "timeout_error", "request_timeout", "the request did not arrive in time")
TOO_MANY_CONNECTIONS = EarlyRefusal(503, "overloaded_error", "too_many_connections", "too many connections; try again")


class Successor(Protocol):
    """What a connection goes on with after HTTP: a WebSocket. websocket.py describes the functions."""

    def feed(self, data: bytes) -> None: ...
    def lost(self) -> None: ...
    def writable(self) -> None: ...
    def stop(self, why: str) -> None: ...
    def phase(self) -> tuple[str, object]: ...
    def late(self) -> None: ...
    def silent(self) -> None: ...


S = TypeVar("S", bound=Successor)


class RequestRefused(Exception):
    """Raised in a callback of the parser to stop the parser."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """A connection with `limits`. `on_refused(code)` counts refusals. The other arguments are uvicorn's.

    uvicorn calls a request with its response a cycle. `self.cycle` is the newest one.
    """

    def __init__(self, limits: ConnectionLimits, on_refused: Callable[[str], None], *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._limits = limits
        self._on_refused = on_refused
        self._refusal = BAD_REQUEST  # the refusal that is sent if parsing fails
        self._new = 0  # number of bytes being parsed now
        self._received = 0  # bytes since the last complete head or request, not counting bytes of a body
        self._unfinished: list[Any] = []  # unfinished pipelined cycles before the newest one
        self._ignores_input = False  # after a refusal, or after the last response
        self._last_refusal: EarlyRefusal | None = None  # a refusal that is sent after the responses before it
        self._offered = False  # whether the request offers to go on as a WebSocket
        self.successor: Successor | None = None
        self._half_closed = False  # whether the client sends no more, and waits for its responses
        self._phase, self._progress, self._since = "", object(), 0.0  # see `check_timeouts`

    # called by asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) < self._limits.connections:
            return super().connection_made(transport)
        self.transport = transport
        self._refuse(TOO_MANY_CONNECTIONS)

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in (*self._unfinished, *[cycle for cycle, _ in self.pipeline]):
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        if self.successor is not None:
            self.successor.lost()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.successor is not None:
            self.successor.writable()

    def data_received(self, data: bytes) -> None:
        if self.successor is not None:
            return self.successor.feed(data)
        if self._ignores_input:
            return
        self._new = len(data)
        self._received += self._new
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        self._parse(data)
        if self._received > self._limits.header_bytes and not self._ignores_input:
            self._refuse(HEAD_TOO_LARGE)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether the connection stays open for responses to requests that are complete."""
        if self.successor is not None:
            return False
        current = [cycle for cycle in (*self._unfinished, self.cycle) if cycle and not cycle.response_complete]
        complete = current and not current[-1].more_body and not self._in_head()
        refused = self._ignores_input and self._last_refusal is None
        if not complete or refused or not self.transport.can_write_eof():
            return False
        if any(cycle.scope["http_version"] == "1.0" for cycle in current):
            return False
        self._half_closed = True
        if not any(cycle.response_started for cycle in current):
            self.transport.write(PROBE)
        abort_when_gone(self.transport, self.loop, lambda: self in self.connections)
        return True

    def _parse(self, data: bytes) -> None:
        """Parses, and ignores offers to use another protocol.

        At an offer, the parser stops after the head and would drop the body. A new parser replaces it, and gets the
        same request without the offer. The old parser reports where the head ends, because `data` may begin before the
        head.
        """
        while True:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._offered = offers_websocket(self.parser.get_method(), self.headers)
                data = self._head_without_upgrade() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            except httptools.HttpParserError:
                return self._refuse(self._refusal)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        return head_without_upgrade(self.parser.get_method(), self.url, version, self.headers)

    # called by uvicorn when the server shuts down, and when a response is complete

    def shutdown(self) -> None:
        if self.successor is not None:
            return self.successor.stop(SHUTDOWN)
        super().shutdown()
        self._abort_after_tls_close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.pipeline:
            if self._last_refusal is not None:
                self._send_refusal(self._last_refusal)
            elif self._half_closed:
                self.transport.close()
        self._abort_after_tls_close()

    def _abort_after_tls_close(self) -> None:
        abort_after_tls_close(self.transport, self.loop, lambda: self in self.connections)

    # called by the parser; an exception stops the parser

    def on_headers_complete(self) -> None:
        self._check_head()
        if self.parser.should_upgrade():
            return  # `_parse` continues with a new parser
        self._received = 0
        previous = self.cycle
        super().on_headers_complete()
        self.headers = []  # for trailers, which are never read; the request keeps the list of its headers
        scope = cast("dict[str, Any]", self.scope)
        scope[DIRECT] = DirectWriter(self.cycle)
        if self._offered:
            scope[UPGRADE] = Upgrade(self)
        self._offered = False
        if not self.parser.should_keep_alive():
            self.cycle.transport = CloseAfterResponse(self.transport, self._close)  # type: ignore[assignment]
        if self.scope["http_version"] == "1.0":
            self.cycle.transport = Http10Transport(self.cycle.transport)  # type: ignore[assignment]
        if self.pipeline:
            self._unfinished = [cycle for cycle in (*self._unfinished, previous) if not cycle.response_complete]
            if len(self.pipeline) > MAX_PIPELINED:
                self._stop_parser(TOO_MANY_PIPELINED)

    def _check_head(self) -> None:
        """Stops the parser if the head is too large, has another HTTP version, does not name exactly one host, is a
        CONNECT, or has a transfer coding besides chunked, of which the parser takes no notice."""
        limit = self._limits.header_bytes
        too_large = max(self._received, self._new) > limit and self._head_bytes() > limit
        if too_large or len(self.headers) > MAX_HEADERS:
            self._stop_parser(HEAD_TOO_LARGE)
        version = self.parser.get_http_version()
        if version not in VERSIONS:
            self._stop_parser(BAD_REQUEST)
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and version != "1.0"):
            self._stop_parser(BAD_HOST)
        if self.parser.get_method() == b"CONNECT":
            self._stop_parser(UPGRADE_REFUSED)
        codings = b",".join(value for name, value in self.headers if name == b"transfer-encoding").lower().split(b",")
        if codings[-1].strip() == b"chunked" and any(one.strip() not in (b"", b"chunked") for one in codings):
            self._stop_parser(BAD_CODING)  # where chunked is not the last, the parser finds no end of the body: 400

    def on_chunk_header(self) -> None:
        self._received = max(0, self._received - CHUNK_SIZE_BYTES)

    def on_body(self, body: bytes) -> None:
        self._received = max(0, self._received - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._received = 0
        super().on_message_complete()

    def _stop_parser(self, refusal: EarlyRefusal) -> None:
        self._refusal = refusal
        raise RequestRefused

    # called by `enforce_timeouts`

    def check_timeouts(self, now: float) -> None:
        """Ends the connection if it has been in its phase for too long without progress."""
        phase, progress = self._where()
        same = progress == self._progress if phase == "writing" else progress is self._progress
        if phase != self._phase or not same:
            self._phase, self._progress, self._since = phase, progress, now
        elif phase == "writing" and now - self._since > self._limits.write_s:
            self._cut_off()
        elif phase == "request" and now - self._since > self._limits.request_s:
            self._on_late()
        elif phase == "idle" and now - self._since > self._limits.idle_s:
            self._on_idle()

    def _on_late(self) -> None:
        if self.successor is None:
            return self._refuse(REQUEST_TIMEOUT)
        self._on_refused(REQUEST_TIMEOUT.code)
        self.successor.late()

    def _on_idle(self) -> None:
        if self.successor is None:
            self.transport.close()
        else:
            self.successor.silent()

    def _where(self) -> tuple[str, Any]:
        """Returns the phase, and a value that changes when the connection makes progress within it."""
        unsent = self.transport.get_write_buffer_size()
        if unsent:
            return "writing", unsent
        if self.successor is not None:
            return self.successor.phase()
        if self._ignores_input:
            return "refused", None
        if any(not cycle.response_complete for cycle in self._unfinished):
            return "responding", None
        if self._in_head():
            return "request", self.scope
        if self.cycle is None:
            return "idle", None
        if self.cycle.more_body:
            return "request", self.cycle.scope.get(RECEIVED, self.scope)
        return ("idle" if self.cycle.response_complete else "responding"), None

    def _in_head(self) -> bool:
        return self.scope is not None and (self.cycle is None or self.cycle.scope is not self.scope)

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    # closing the connection

    def _cut_off(self) -> None:
        self._on_refused("write_timeout")
        for cycle in (*self._unfinished, self.cycle):
            if cycle is not None:
                cycle.scope[CLOSED] = "write_timeout"
        self.transport.abort()

    def _refuse(self, refusal: EarlyRefusal) -> None:
        """Sends the refusal and closes. Nothing is sent if it would end up in the middle of another response.

        A client with too many pipelined requests did nothing wrong with those before, which are complete. They are
        answered, and the refusal comes after them.
        """
        self._ignores_input = True
        self._on_refused(refusal.code)
        if refusal is TOO_MANY_PIPELINED:
            self.pipeline.popleft()
            self.cycle, _ = self.pipeline[0]
            self.scope = self.cycle.scope
            self._last_refusal = refusal
            return
        current = [cycle for cycle in (*self._unfinished, self.cycle) if cycle and not cycle.response_complete]
        responding = any(cycle.response_started or not cycle.more_body for cycle in current)
        for cycle in current:
            cycle.disconnected = True
            cycle.message_event.set()
        if responding:
            self.transport.close()
            return
        self._send_refusal(refusal)

    def _send_refusal(self, refusal: EarlyRefusal) -> None:
        self.transport.write(_response(refusal))
        self._linger()

    def _close(self) -> None:
        """Closes after the last response, which may have been sent before the request was complete."""
        if self.cycle is not None and self.cycle.more_body:
            self._ignores_input = True
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Closes after LINGER_S, so that the client can read the response: closing with unread input would discard
        it."""
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)


class Upgrade:
    """A client's offer to go on as a WebSocket after the request, which a route may accept."""

    __slots__ = ("_connection",)

    def __init__(self, connection: LimitedHttpProtocol) -> None:
        self._connection = connection

    def accept(self, headers: Iterable[tuple[bytes, bytes]], successor: Callable[[Any, Any], S]) -> S | None:
        """Hands the connection over to what `successor` makes of the transport and its flow control, and returns that.

        Returns None and changes nothing if HTTP is not over: the body is incomplete, or other requests are pipelined.
        """
        it = self._connection
        cycle = it.cycle
        if it.pipeline or cycle is None or cycle.scope is not it.scope or cycle.more_body or it.transport.is_closing():
            return None
        cycle.response_started = True
        usual = [one for one in it.server_state.default_headers if one[0] != b"connection"]
        head = [*usual, (b"connection", b"Upgrade"), (b"upgrade", b"websocket"), *headers]
        lines = [b"%b: %b\r\n" % header for header in head]
        it.transport.write(STATUS_LINE[101] + b"".join(lines) + b"\r\n")
        made = successor(it.transport, it.flow)
        it.successor = made
        return made

    def finish(self) -> None:
        """Ends the request whose connection was handed over."""
        self._connection.cycle.response_complete = True
        abort_after_tls_close(self._connection.transport, self._connection.loop, self._is_open)

    def _is_open(self) -> bool:
        return self._connection in self._connection.connections


class CloseAfterResponse:
    """A transport for the last response of a connection. Its `close` is the given function."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


def _response(refusal: EarlyRefusal) -> bytes:
    error = {"message": refusal.message, "type": refusal.kind, "param": None, "code": refusal.code}
    body = json.dumps({"error": error}).encode()
    retry = b"retry-after: 1\r\n" if refusal.status == 503 else b""
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
    return STATUS_LINE[refusal.status] + head + retry + b"\r\n" + body


async def enforce_timeouts(connections: Collection[Any], limits: ConnectionLimits) -> None:
    """Checks every `LimitedHttpProtocol` connection of a server, until cancelled."""
    pause = min(1.0, min(limits.request_s, limits.write_s, limits.idle_s) / 4)
    now = asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(pause)
        for connection in list(connections):
            connection.check_timeouts(now())
