"""ASGI middleware: checks host, origin and API key, turns exceptions into responses, and adds request ids.

Knows HTTP statuses. access.py knows the allowed names, pages and keys. The API format writes the body of an error.
"""

import asyncio
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.errors import (
    BadRequest,
    DeadlineExceeded,
    Internal,
    MethodNotAllowed,
    NotFound,
    NotSupported,
    Overloaded,
    SluiceError,
)
from frontend.generation.generation import Generation
from frontend.generation.service import Windows
from frontend.request import GenerationRequest, Notes, notes
from frontend.server.access import KEYS, Admission, ApiKeys, Hosts, Origins
from frontend.turns import tenant

# What is known of an HTTP request until it ends: the access log, metrics, traces and recordings are made of it.


def ignore() -> None:
    """Does nothing: the `release` of a record that keeps no body."""


class RequestRecord:
    """What is known of an HTTP request until it ends. The middleware creates the record, and the route adds to it."""

    __slots__ = (
        "admission", "answer", "api_format", "began_at", "body", "error", "fingerprint", "generation",
        "generation_request", "method", "outcome", "path", "release", "request_id", "status", "tenant", "trace",
    )  # fmt: skip

    def __init__(self, request_id: str, method: str, path: str, trace: str) -> None:
        self.began_at = time.perf_counter()
        self.request_id = request_id
        self.method = method
        self.path = path[:256]
        self.trace = trace  # the W3C traceparent header
        self.tenant = ""  # the name of the request's API key
        self.admission: Mapping[str, Any] = {}  # tenant and priority, as the request's headers say
        self.status: int | None = None
        self.outcome = ""  # how the request ended, if it has no generation
        self.error: str | None = None
        self.api_format: str | None = None
        self.generation_request: GenerationRequest | None = None
        self.generation: Generation | Windows | None = None
        self.fingerprint = ""
        self.body = b""  # the request's body; only with --record-text
        self.answer: list[bytes] = []  # pieces of the response's body; only with --record-text
        self.release: Callable[[], None] = ignore  # stops counting `body` when the request has ended

    def failed(self, error: SluiceError) -> None:
        self.error = error.code or error.kind
        if isinstance(error, DeadlineExceeded):
            self.outcome = "deadline"
        else:
            self.outcome = "refused" if error.status < 500 or isinstance(error, Overloaded) else "error"


log = logging.getLogger("sluice.frontend")
# Routes that show no data. Their hosts are not checked, because probes use addresses that no setting can list.
PROBES = frozenset({"/health", "/v1/health", "/ping", "/ready", "/health_generate"})
OPEN_ROUTES = PROBES | {"/"}  # the playground's page and files contain no data either
PAGE_FILES = "/web/"
API_FORMAT = "sluice.api_format"  # key in a request's scope: the API format, which the route adds
REQUEST_ID = "sluice.request_id"
CLOSED = "sluice.closed"  # why the server cut the connection off, if it did
RECORD = "sluice.record"  # the RequestRecord
STREAMS = "sluice.streams"  # whether the body asks for a stream; the route adds it when the body is decoded
RECEIVED = "sluice.received"  # another object whenever a long body has made progress, so that it may take its time
DIRECT = "sluice.direct"  # a DirectWriter, if the server offers one
UPGRADE = "sluice.upgrade"  # an http_protocol.Upgrade, if the client offers to go on as a WebSocket
IGNORED_FIELDS = "sluice.ignored_fields"  # the names of unknown fields that were ignored, if any
FINGERPRINT = "sluice.fingerprint"  # the fingerprint of the server that computes the answer, once it is known
SEND = "sluice.send"  # the server's own `send`, so that a stream's thousands of writes skip the layers in between
MAX_HEADER_CHARS = 1024
MORE = ", ..."
_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def header_value(names: Iterable[str]) -> str:
    """Returns names as a header value, separated by commas; a value that would be too long ends with `MORE`."""
    value = ", ".join(names)
    if len(value) <= MAX_HEADER_CHARS:
        return value
    return value[: MAX_HEADER_CHARS - len(MORE)].rpartition(", ")[0] + MORE


class Envelope(Protocol):
    """The part of an API format that writes errors."""

    def status(self, exc: SluiceError, /) -> int: ...
    def error(self, exc: SluiceError, request_id: str) -> bytes: ...


def client_error(exc: Exception, request_id: str) -> SluiceError:
    """Converts any exception into one that a client may see, and logs server errors with their traceback."""
    if isinstance(exc, HTTPException):
        if exc.status_code == 405:
            return MethodNotAllowed(str(exc.detail), allow=(exc.headers or {}).get("Allow", ""))
        return (NotFound if exc.status_code == 404 else SluiceError)(str(exc.detail))
    if isinstance(exc, RecursionError):  # only a client's value is nested so deeply
        return BadRequest("the request has a value that is nested too deeply")
    if not isinstance(exc, SluiceError):
        log.error("request %s failed", request_id, exc_info=exc)
        return Internal(f"internal error, logged as request {request_id}", code="internal_error")
    if exc.status >= 500 and not isinstance(exc, Overloaded | DeadlineExceeded | NotSupported):
        log.error("request %s failed: %s", request_id, exc)
    return exc


def error_response(exc: SluiceError, envelope: Envelope, request_id: str) -> Response:
    headers = {}
    status = envelope.status(exc)
    if status == 503:
        headers["Retry-After"] = str(max(1, math.ceil(exc.retry_after or 1.0)))
    if status == 504:
        headers["X-Should-Retry"] = "false"  # SDKs would retry, but the deadline has passed
    if isinstance(exc, MethodNotAllowed) and exc.allow:
        headers["Allow"] = exc.allow
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(envelope.error(exc, request_id), status, headers, "application/json")


@dataclass(slots=True)
class Live:
    """How many requests that may compute (POST) have come from clients and not ended."""

    count: int = 0


class RequestMiddleware:
    """The middleware around all routes."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        hosts: Hosts,
        origins: Origins,
        admission: Admission,
        envelope: Callable[[str], Envelope],
        rejected: Callable[[str], None],
        ended: Callable[[RequestRecord], None],
        live: Live | None = None,
    ) -> None:
        """
        admission: reads the tenant and the priority from a request's headers
        envelope: writes errors for a path until the route has chosen its API format
        rejected: counts the responses with status 503 by their reason
        ended: called once for each request, when its response is complete or its client has gone
        live: counts the requests
        """
        self._app = app
        self._keys = keys
        self._hosts = hosts
        self._origins = origins
        self._admission = admission
        self._envelope = envelope
        self._rejected = rejected
        self._ended = ended
        self._live = Live() if live is None else live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        counted = scope["method"] == "POST"
        scope[REQUEST_ID] = request_id
        scope[SEND], scope[KEYS] = send, self._keys
        noted = Notes()
        record = scope[RECORD] = RequestRecord(
            request_id, scope["method"], scope["path"], headers.get("traceparent", "")
        )

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers_out = MutableHeaders(scope=message)
                headers_out["X-Request-Id"] = headers_out["Request-Id"] = request_id  # OpenAI's name and Anthropic's
                if IGNORED_FIELDS in scope:
                    headers_out["X-Sluice-Ignored-Fields"] = scope[IGNORED_FIELDS]
                if noted.not_enforced:
                    paths = [quote(path, safe="[]$") for path in noted.not_enforced]  # ASCII without commas
                    headers_out["X-Sluice-Not-Enforced"] = header_value(paths)
                if noted.lowered:
                    lowered = [f"{field}={limit}" for field, limit in noted.lowered.items()]
                    headers_out["X-Sluice-Lowered-Fields"] = header_value(lowered)
                if FINGERPRINT in scope:
                    headers_out["X-Sluice-Fingerprint"] = scope[FINGERPRINT]
            await send(message)

        self._live.count += counted
        try:
            if scope["path"] not in PROBES:
                self._hosts.check(headers)
            self._origins.check(scope["method"], headers)
            if not _is_open(scope["path"]):
                record.tenant = self._keys.identify(headers)
                record.admission = self._admission(headers, record.tenant)
            tenant.set(record.admission.get("tenant", "") or _address(scope))
            notes.set(noted)
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            record.outcome = "client_gone"
        except asyncio.CancelledError:
            record.outcome = "shutdown"
            raise
        except Exception as exc:
            error = client_error(exc, request_id)
            record.failed(error)
            if record.status is not None:
                raise
            if isinstance(error, Overloaded):
                self._rejected(error.code or "overloaded")
            envelope = scope.get(API_FORMAT) or self._envelope(scope["path"])
            await error_response(error, envelope, request_id)(scope, receive, send_with_id)
        finally:
            self._live.count -= counted
            self._ended(record)


def _is_open(path: str) -> bool:
    """Whether a path needs no key. A browser cannot send a key with the page itself, only with the page's requests."""
    return path in OPEN_ROUTES or path.startswith(PAGE_FILES)


def _address(scope: Scope) -> str:
    """Returns the address of the client, by which clients without keys share; empty if it is not known."""
    client = scope.get("client")
    return client[0] if client else ""


def _request_id(headers: Headers) -> str:
    """Returns the client's id if it is valid, and else a new one."""
    client_id = headers.get("x-request-id", "")
    return client_id if _VALID_ID.fullmatch(client_id) else f"req_{secrets.token_hex(12)}"


class DirectWriter:
    """Writes to the socket without waiting or a task. It does the same as uvicorn's `send` with a chunked body."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle

    def ready(self) -> bool:
        """Whether the client reads as fast as the server writes."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (cycle.flow.write_paused or cycle.disconnected)

    def write(self, body: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def cut(self) -> None:
        """Closes the connection in the middle of the response, so that no client takes what it has for the whole."""
        self._cycle.transport.close()
