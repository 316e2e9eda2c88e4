"""ASGI middleware: checks host, origin and API key, turns exceptions into responses, and adds request ids.

Knows HTTP statuses. access.py knows the allowed names, pages and keys. The API format writes the body of an error.
"""

import asyncio
import logging
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
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
    TooLarge,
)
from frontend.request import Notes, notes
from frontend.server.access import KEYS, Admission, ApiKeys, Hosts, Origins
from frontend.server.content_coding import Coding, unpacked
from frontend.server.request_record import RequestRecord
from frontend.turns import tenant

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
DIRECT = "sluice.direct"  # an http_protocol.DirectWriter, if the server offers one
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


# Reads the bodies of requests, and limits the size of each body and the size of all bodies in memory together.
#
# All bodies are counted, from their first byte. A tenant may have SHARE times as many bytes as are still free, so
# that there is always room for others: one tenant has at most 170 of 256 MiB, two have at most 102 MiB each. When a
# tenant has its share, a body that arrives takes the place of the tenant's slowest upload; so uploads that never end
# hold no room.
#
# Knows HTTP's requests, but no route, API format or model.

TEXT_BYTES = 8 << 20  # limit for a body without pictures
PICTURE_BYTES = 8 << 20  # size of an ordinary picture in base64: a photograph of 6 MiB
FILE_BYTES = 27 << 20  # size of the largest accepted picture in base64, see frontend/chat/image_sources.py
LARGEST_BYTES = 128 << 20  # limit for a body with any number of pictures
MAX_HELD_BYTES = 256 << 20  # limit for all bodies together
SHARE = 2  # a tenant's bodies may have so many times the bytes that are free
GRACE_S = 1.0  # an upload younger than this makes room for no other; one that stands still for longer counts as slow
HELD = "sluice.body"  # key in a request's scope: the _Body that is counted


def largest_body(pictures: int) -> int:
    """Returns the limit on a body in bytes. pictures: how many pictures it may have; 0: the model accepts none"""
    return TEXT_BYTES + min(max(FILE_BYTES, pictures * PICTURE_BYTES), LARGEST_BYTES - TEXT_BYTES) * (pictures > 0)


@dataclass(eq=False, slots=True)
class _Body:
    """A body in memory. Times are those of a monotonic clock, in seconds.

    task: the task that reads the body; cancelled when the upload must make room
    """

    tenant: str
    task: "asyncio.Task[object] | None"
    began: float
    progressed: float
    size: int = 0
    dropped: bool = False

    def rate(self, now: float) -> float:
        """Returns the bytes per second so far; 0 if the upload stands still."""
        return 0.0 if now - self.progressed > GRACE_S else self.size / max(now - self.began, 1e-9)


class Bodies:
    """Counts the bytes of all bodies in memory."""

    def __init__(self) -> None:
        self.held = 0
        self._of_tenants: Counter[str] = Counter()
        self._arriving: dict[str, set[_Body]] = {}

    async def read(self, request: Request, most: int, coding: Coding | None = None) -> bytes:
        """Returns the body of a request. Its bytes stay counted until `release`.

        coding: what the body is unpacked from; `most` then limits both, and what the decoder keeps is counted, too

        Raises TooLarge as soon as its announced, received or unpacked length exceeds `most` bytes, and Overloaded as
        soon as its tenant has no room for it, or if the upload is so slow that others take its place.
        """
        now = time.monotonic()
        body = request.scope[HELD] = _Body(tenant.get(), asyncio.current_task(), now, now)
        announced = request.headers.get("content-length", "0")
        if announced.isdigit():  # checked before `Expect: 100-continue` is answered
            self._check(body, int(announced), most)
        data = bytearray()
        arriving = self._arriving.setdefault(body.tenant, set())
        arriving.add(body)
        try:
            async for piece in unpacked(request.stream(), coding):
                data += piece
                kept = 0 if coding is None else min(len(data), coding.window)
                self._check(body, len(data), most, kept)
                self._count(body, len(data) + kept)
        except asyncio.CancelledError:
            if body.dropped and body.task is not None and not body.task.uncancel():
                raise _full("this one arrived too slowly") from None
            raise
        finally:
            arriving.discard(body)
            if not self._arriving.get(body.tenant, True):
                del self._arriving[body.tenant]
        self._count(body, len(data))
        return bytes(data)

    def release(self, request: Request) -> None:
        """Stops counting the body of this request, when it is no longer in memory."""
        body: _Body | None = request.scope.pop(HELD, None)
        if body is not None:
            self._count(body, 0)

    def _count(self, body: _Body, size: int) -> None:
        if body.dropped:
            return
        more, body.size, body.progressed = size - body.size, size, time.monotonic()
        self.held += more
        self._of_tenants[body.tenant] += more
        if not self._of_tenants[body.tenant]:
            del self._of_tenants[body.tenant]

    def _check(self, body: _Body, size: int, most: int, kept: int = 0) -> None:
        """kept: bytes beside the body's own"""
        if size > most:
            raise TooLarge(f"the body is larger than {most} bytes (--max-body-bytes)", code="request_too_large")
        size += kept
        while not self._fits(body, size):
            slowest = self._slowest(body)
            if slowest is None:
                raise _full("more than this client may have at once")
            self._drop(slowest)

    def _fits(self, body: _Body, size: int) -> bool:
        more = size - body.size
        free = MAX_HELD_BYTES - self.held - more
        return not more or self._of_tenants[body.tenant] + more <= SHARE * free

    def _slowest(self, body: _Body) -> _Body | None:
        """Returns the tenant's slowest upload, if it is slower than `body`."""
        now = time.monotonic()
        others = [
            one
            for one in self._arriving.get(body.tenant, ())
            if one is not body and one.size and now - one.began > GRACE_S
        ]
        found = min(others, key=lambda one: one.rate(now), default=None)
        is_new = now - body.began <= GRACE_S
        return found if found is not None and (is_new or found.rate(now) < body.rate(now)) else None

    def _drop(self, body: _Body) -> None:
        """Ends an upload, whose bytes stop counting at once."""
        self._count(body, 0)
        body.dropped = True
        self._arriving[body.tenant].discard(body)
        if body.task is not None:
            body.task.cancel()


def _full(why: str) -> Overloaded:
    return Overloaded(
        f"the bodies of all requests have {MAX_HELD_BYTES >> 20} MiB together: {why}",
        code="queue_full", retry_after=1.0,
    )  # fmt: skip


# What connections remember between their requests: conversations that the next request of a WebSocket goes on with.
#
# All of them together have a bound. When there is no room, the tenant that has most loses what it has had for longest.
# So nobody may rely on what is remembered, and a client that finds it gone sends the whole again.

MOST_REMEMBERED_BYTES = 64 << 20


@dataclass(eq=False, slots=True)
class Entry:
    """data: None once it is forgotten"""

    tenant: str
    data: bytes | None


class Remembered:
    """The entries of a process."""

    def __init__(self, most: int = MOST_REMEMBERED_BYTES) -> None:
        self._most = most
        self._entries: dict[Entry, int] = {}  # → its bytes; the oldest first
        self._of_tenants: Counter[str] = Counter()

    def keep(self, tenant: str, data: bytes) -> Entry:
        """Returns an entry with the data; without, if there is more of it than there may be of all."""
        entry = Entry(tenant, None)
        if len(data) > self._most:
            return entry
        while self._of_tenants.total() + len(data) > self._most:
            largest = max(self._of_tenants, key=self._of_tenants.__getitem__)
            self.forget(next(one for one in self._entries if one.tenant == largest))
        entry.data, self._entries[entry] = data, len(data)
        self._of_tenants[tenant] += len(data)
        return entry

    def forget(self, entry: Entry) -> None:
        entry.data = None
        if size := self._entries.pop(entry, 0):
            self._of_tenants[entry.tenant] -= size
            if not self._of_tenants[entry.tenant]:
                del self._of_tenants[entry.tenant]
