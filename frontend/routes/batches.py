"""Batches on a server with a store: OpenAI's /v1/batches and Anthropic's message batches, made, shown and ended."""

import asyncio
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Router
from starlette.types import Message

from frontend.api.anthropic import batches as anthropic
from frontend.api.anthropic.batches import MessageBatchRequest
from frontend.api.openai import batches as openai
from frontend.api.openai.batches import BatchRequest, request_id
from frontend.app_state import AppState, json_response
from frontend.errors import BadRequest, NotFound
from frontend.kept import batches, conversations, files
from frontend.kept.batch_runner import Answer, BatchFormat
from frontend.kept.batches import Batch, Line
from frontend.kept.database import Connection
from frontend.kept.kept import Kept
from frontend.routes.files import PACKING, add_stored
from frontend.routes.kept import store_of, tenant_of
from frontend.server.access import ApiKeys, Hosts, Origins
from frontend.server.bodies import largest_body
from frontend.server.middleware import Envelope, RequestMiddleware, RequestRecord
from shared.config.frontend import FrontendConfig

MAX_PAGE, OPENAI_PAGE = 1000, 20
MOST_OPEN = 1000  # batches of a key that have not ended, which every frontend looks at each half second


def formats(config: FrontendConfig) -> Mapping[str, BatchFormat]:
    """Returns the forms of batches by name."""
    most = config.max_body_bytes or largest_body(config.max_images_per_request)
    return {openai.NAME: openai.Format(most), anthropic.NAME: anthropic.Format()}


async def create(app: AppState, request: Request) -> Response:
    kept, tenant = store_of(app), tenant_of(request)
    body = await app.decode(request, await app.body(request), BatchRequest)
    file = await files.existing(kept.store, body.input_file_id, tenant, "input_file_id")
    if file.purpose != "batch":
        raise BadRequest("`input_file_id`: the file's purpose is not batch", param="input_file_id", code="out_of_range")
    one = _new(tenant, openai.NAME, batches.VALIDATING, body.endpoint, "batch_", openai.WINDOW_S)
    one.input_file, one.metadata = file.id, body.metadata
    if body.output_expires_after is not None:
        one.keep_output_s = body.output_expires_after.seconds
    await _check_open(kept, tenant)
    await add_stored(app, request, file.bytes, partial(batches.insert, one=one))
    kept.batches.wake()
    return json_response(openai.shown(one))


async def _check_open(kept: Kept, tenant: str) -> None:
    if await kept.store.read(partial(batches.count_open, tenant=tenant)) >= MOST_OPEN:
        raise BadRequest(f"{MOST_OPEN} batches of this key have not ended: cancel some", code="too_many_batches")


def _new(tenant: str, format: str, status: str, endpoint: str, prefix: str, window_s: float) -> Batch:
    now = time.time()
    return Batch(
        f"{prefix}{secrets.token_hex(12)}", tenant, format, status, int(now), now + window_s, None, endpoint, "", None,
        {status: int(now)}, [],
    )  # fmt: skip


async def get(app: AppState, request: Request) -> Response:
    return json_response(openai.shown(await _asked(app, request, openai.NAME)))


async def cancel(app: AppState, request: Request) -> Response:
    return json_response(openai.shown(await _cancelled(app, request, openai.NAME)))


async def list_batches(app: AppState, request: Request) -> Response:
    found, more = await _page(app, request, openai.NAME, OPENAI_PAGE, "after", "")
    shown = [openai.shown(one) for one in found]
    return json_response(_listed(shown, more) | {"object": "list"})


# message batches


async def create_messages(app: AppState, request: Request) -> Response:
    kept, tenant = store_of(app), tenant_of(request)
    body = await app.decode(request, await app.body(request), MessageBatchRequest)
    lines = await PACKING.run(_packed, body)
    one = _new(tenant, anthropic.NAME, batches.VALIDATING, anthropic.ENDPOINT, "msgbatch_", anthropic.WINDOW_S)
    one.owner = kept.store.owner
    await _check_open(kept, tenant)
    size = sum(len(data) + len(id) + files.ROW_BYTES for _, id, data in lines)
    await add_stored(app, request, size, partial(_insert_whole, one, lines))
    kept.batches.wake()
    return json_response(anthropic.shown(await _again(kept, one), _url(request)))


def _packed(body: MessageBatchRequest) -> list[tuple[int, str, bytes]]:
    """Returns number, custom id and compressed request of each line: up to a second of work."""
    return [(number, id, zlib.compress(data, 1)) for number, id, data in anthropic.lines_of(body)]


def _insert_whole(one: Batch, lines: Sequence[tuple[int, str, bytes]], db: Connection) -> None:
    batches.insert(db, one)
    batches.add_lines(db, one.id, one.owner, lines)
    batches.validated(db, one.id, one.owner, [], len(lines), sum(len(data) for _, _, data in lines))


async def get_messages(app: AppState, request: Request) -> Response:
    return json_response(anthropic.shown(await _asked(app, request, anthropic.NAME), _url(request)))


async def cancel_messages(app: AppState, request: Request) -> Response:
    return json_response(anthropic.shown(await _cancelled(app, request, anthropic.NAME), _url(request)))


async def list_messages(app: AppState, request: Request) -> Response:
    found, more = await _page(app, request, anthropic.NAME, OPENAI_PAGE, "after_id", "before_id")
    return json_response(_listed([anthropic.shown(one, _url(request)) for one in found], more))


async def delete_messages(app: AppState, request: Request) -> Response:
    one = await _asked(app, request, anthropic.NAME)
    if one.ended is None:
        raise BadRequest(f"the batch {one.id} has not ended; cancel it first", code="batch_not_ended")
    await store_of(app).store.write(partial(batches.delete, id=one.id))
    return json_response({"id": one.id, "type": "message_batch_deleted"})


async def results(app: AppState, request: Request) -> Response:
    one = await _asked(app, request, anthropic.NAME)
    if one.ended is None:
        raise BadRequest(f"the batch {one.id} has not ended, so it has no results yet", code="batch_not_ended")
    lines = files.lines_of(store_of(app).store, one.id, batches.ENDED)
    return StreamingResponse(lines, media_type="application/x-jsonl")


def _url(request: Request) -> str:
    return f"{request.url.scheme}://{request.url.netloc}"


# both


async def _asked(app: AppState, request: Request, format: str) -> Batch:
    """Returns the batch that a request names. Raises NotFound, also for one of another tenant or another API."""
    id, tenant = request.path_params["id"], tenant_of(request)
    found = await store_of(app).store.read(partial(batches.find, id=id, tenant=tenant, format=format))
    if found is None:
        raise NotFound(f"there is no batch {id!r:.80}", code="batch_not_found")
    return found


async def _again(kept: Kept, one: Batch) -> Batch:
    found = await kept.store.read(partial(batches.any_of, id=one.id))
    if found is None:
        raise NotFound("the batch was deleted", code="batch_not_found")
    return found


async def _cancelled(app: AppState, request: Request, format: str) -> Batch:
    kept, one = store_of(app), await _asked(app, request, format)
    if one.ended is not None and format == openai.NAME:
        raise BadRequest(f"the batch {one.id} is {one.status} and cannot be cancelled", code="batch_ended")
    await kept.store.write(partial(batches.cancel, id=one.id))
    kept.batches.wake()
    return await _again(kept, one)


async def _page(
    app: AppState, request: Request, format: str, usual: int, after: str, before: str
) -> tuple[list[Batch], bool]:
    """Returns a page of the tenant's batches, newest first, and whether there are more. Raises BadRequest.

    after, before: the names of the query parameters with the id behind or before which the page is; empty: none
    """
    kept, query = store_of(app), request.query_params
    most = conversations.limit_of(query, MAX_PAGE, usual)
    last = query.get(after)
    first = query.get(before) if before and last is None else None
    name, anchor = (before, first) if last is None else (after, last)
    work = partial(batches.listed, tenant=tenant_of(request), format=format, most=most + 1, after=last, before=first)
    ids = await kept.store.read(work)
    if ids is None:
        raise BadRequest(f"`{name}`: there is no batch {anchor!r:.80}", param=name, code="out_of_range")
    return await _rows(kept, ids[:most] if first is None else ids[-most:]), len(ids) > most


async def _rows(kept: Kept, ids: Sequence[str]) -> list[Batch]:
    found = [await kept.store.read(partial(batches.any_of, id=id)) for id in ids]
    return [one for one in found if one is not None]


def _listed(shown: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"data": shown, "first_id": first, "last_id": last, "has_more": more}


# Has a line of a batch answered by the route it is for, as if it had come as a request of its own.
#
# It has no connection and no headers: its tenant is the batch's, its priority the lowest there is. Everything else is
# what a request has, so answers, errors, metrics and logs are the same.

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
