"""The one place where exceptions become answers; also checks the API key, and gives every answer its request id.

Knows HTTP statuses; which keys there are is known to keys.py, how an error is worded to the dialect.
"""

import asyncio
import logging
import math
import re
import secrets
from collections.abc import Callable
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.errors import DeadlineExceeded, Internal, MethodNotAllowed, NotFound, Overloaded, SluiceError
from frontend.observability.access_log import RequestRecord
from frontend.server.auth import ApiKeys

log = logging.getLogger("sluice.frontend")

OPEN_ROUTES = frozenset({"/health", "/ready", "/"})  # and the page's files, which hold no data
PAGE_FILES = "/web/"
DIALECT = "sluice.dialect"  # in the scope, set as soon as the route knows
REQUEST_ID = "sluice.request_id"
CLOSED = "sluice.closed"  # why the connection was cut off, when it was we who did
RECORD = "sluice.exchange"  # what the access log will tell of it
DIRECT = "sluice.direct"  # the server's way to the socket that does not wait, where it has one (http.Direct)
SEND = "sluice.send"  # the server's own `send`: a stream's thousands of bodies need none of the layers between

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Envelope(Protocol):
    """The part of a dialect that makes an error's body."""

    def error(self, exc: SluiceError, request_id: str) -> bytes: ...


def client_error(exc: Exception, request_id: str) -> SluiceError:
    """Any exception as one that a client may see; those that are a fault of the server are logged with their trace."""
    if isinstance(exc, HTTPException):
        if exc.status_code == 405:
            return MethodNotAllowed(str(exc.detail), allow=(exc.headers or {}).get("Allow", ""))
        return (NotFound if exc.status_code == 404 else SluiceError)(str(exc.detail))
    if not isinstance(exc, SluiceError):
        log.error("request %s failed", request_id, exc_info=exc)
        return Internal(f"internal error, logged as request {request_id}", code="internal_error")
    if exc.status >= 500 and not isinstance(exc, Overloaded | DeadlineExceeded):
        log.error("request %s failed: %s", request_id, exc)
    return exc


def error_response(exc: SluiceError, envelope: Envelope, request_id: str) -> Response:
    headers = {}
    if exc.status == 503:
        headers["Retry-After"] = str(max(1, math.ceil(exc.retry_after or 1.0)))
    if exc.status == 504:
        headers["X-Should-Retry"] = "false"  # the SDKs would; but the client's time is over
    if isinstance(exc, MethodNotAllowed) and exc.allow:
        headers["Allow"] = exc.allow
    if exc.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(envelope.error(exc, request_id), exc.status, headers, "application/json")


class RequestMiddleware:
    """ASGI middleware around all routes."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        envelope: Callable[[str], Envelope],
        rejected: Callable[[str], None],
        ended: Callable[[RequestRecord], None],
    ) -> None:
        """`envelope(path)` words errors until the route has chosen its dialect; `rejected(reason)` counts 503s.

        `ended` is called once for each request, when its answer is through or nobody waits for it any more.
        """
        self._app = app
        self._keys = keys
        self._envelope = envelope
        self._rejected = rejected
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        scope[REQUEST_ID] = request_id
        scope[SEND] = send
        exchange = scope[RECORD] = RequestRecord(
            request_id, scope["method"], scope["path"], headers.get("traceparent", "")
        )

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                out = MutableHeaders(scope=message)
                out["X-Request-Id"] = out["Request-Id"] = request_id  # OpenAI's name and Anthropic's
            await send(message)

        try:
            if not _is_open(scope["path"]):
                exchange.tenant = self._keys.identify(headers)
            await self._app(scope, receive, tagged)
        except ClientDisconnect:
            exchange.outcome = "client_gone"
        except asyncio.CancelledError:
            exchange.outcome = "shutdown"
            raise
        except Exception as exc:
            error = client_error(exc, request_id)
            exchange.failed(error)
            if exchange.status is not None:
                raise
            if isinstance(error, Overloaded):
                self._rejected(error.code or "overloaded")
            envelope = scope.get(DIALECT) or self._envelope(scope["path"])
            await error_response(error, envelope, request_id)(scope, receive, tagged)
        finally:
            self._ended(exchange)


def _is_open(path: str) -> bool:
    """A browser can send no key with the page itself, only with what the page asks for."""
    return path in OPEN_ROUTES or path.startswith(PAGE_FILES)


def _request_id(headers: Headers) -> str:
    """The client's own when it is a sane one."""
    given = headers.get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
