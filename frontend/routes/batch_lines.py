"""Sends a line of a batch to the route that it names, as if it had come as a separate request.

It has no connection and no headers: its tenant is the batch's, its priority the lowest there is. Everything else is
what a request has, so answers, errors, metrics and logs are the same.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.routing import Router
from starlette.types import Message

from frontend.api.openai.batches import request_id
from frontend.kept.batch_runner import Answer
from frontend.kept.batches import Batch, Line
from frontend.server.access import ApiKeys, Hosts, Origins
from frontend.server.middleware import Envelope, RequestMiddleware
from frontend.server.request_record import RequestRecord

LOWEST = (1 << 31) - 1  # of priorities; a lower number goes first
KEEPS = "/v1/responses"  # keeps its answers, if a request does not say otherwise


class LineKeys(ApiKeys):
    """The keys of a batch's lines: only that of the batch's tenant, without administrator rights."""

    def __init__(self, tenant: str) -> None:
        super().__init__("")
        self._tenant = tenant

    def identify(self, headers: Headers) -> str:
        return self._tenant.partition("/")[0]  # without the fairness id of a gateway

    def administers(self, headers: Headers) -> bool:
        return False


class Lines:
    """Sends lines through a server's routes."""

    def __init__(
        self, routes: Router, envelope: Callable[[str], Envelope], ended: Callable[[RequestRecord], None]
    ) -> None:
        """For `envelope` and `ended` see RequestMiddleware."""
        self._routes, self._envelope, self._ended = routes, envelope, ended

    async def __call__(self, batch: Batch, line: Line) -> Answer:
        """Returns what the route answers."""
        turned_away: list[str] = []
        admitted: Mapping[str, Any] = {"tenant": batch.tenant, "priority": LOWEST}
        app = RequestMiddleware(
            self._routes, keys=LineKeys(batch.tenant), hosts=Hosts(["*"]), origins=Origins([]),
            admission=lambda headers, tenant: admitted, envelope=self._envelope, rejected=turned_away.append,
            ended=self._ended,
        )  # fmt: skip
        id, received = request_id(batch.id, line.number), _Received(_body(batch, line))
        headers = [(b"content-type", b"application/json"), (b"x-request-id", id.encode())]
        await app(
            {
                "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
                "path": batch.endpoint, "raw_path": batch.endpoint.encode(), "root_path": "", "query_string": b"",
                "headers": headers, "client": None, "server": None,
            },
            received.receive, received.send,
        )  # fmt: skip
        return Answer(received.status, bytes(received.data), id, bool(turned_away))


def _body(batch: Batch, line: Line) -> bytes:
    """Returns the body of a line's request. A response is kept beside the batch only if the line asks for it."""
    if batch.endpoint != KEEPS:
        return line.body
    body = msgspec.json.decode(line.body)
    return msgspec.json.encode({"store": False, **body}) if isinstance(body, dict) else line.body


class _Received:
    """The two ends of a request without a connection: its body, and what comes back."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status, self.data = 500, bytearray()

    async def receive(self) -> Message:
        """Returns the body; then waits for ever, as a client does that stays."""
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.data += message.get("body", b"")
