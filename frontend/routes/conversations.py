"""Conversations of OpenAI's Responses API, on a server with a store: made, shown, changed, deleted, and their items."""

import secrets
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from frontend.api.openai.responses_request import Item
from frontend.app_state import AppState, json_response
from frontend.errors import NotFound
from frontend.kept import conversations
from frontend.kept.conversations import Conversation
from frontend.kept.store import Store
from frontend.routes.files import add_stored
from frontend.routes.kept import store_of, tenant_of
from frontend.schema.base import RequestModel
from frontend.schema.request_fields import KeptMetadata, check_metadata, doc

MAX_ITEMS = 20  # that one request may add; OpenAI's limit
Items = Annotated[list[Item], Meta(max_length=MAX_ITEMS)]


class ConversationRequest(RequestModel):
    items: Annotated[Items | None, doc("The first items")] = None
    metadata: Annotated[KeptMetadata | None, doc("Kept and shown")] = None

    def __post_init__(self) -> None:
        check_metadata(self.metadata)


class ConversationUpdate(RequestModel):
    metadata: Annotated[KeptMetadata, doc("Takes the place of the old")]

    def __post_init__(self) -> None:
        check_metadata(self.metadata)


class ItemsRequest(RequestModel):
    items: Annotated[Items, doc("Added at the end")]


async def create(app: AppState, request: Request) -> Response:
    store = store_of(app).store
    raw = await app.body(request)
    body = await app.decode(request, raw, ConversationRequest)
    id, tenant = f"conv_{secrets.token_hex(16)}", tenant_of(request)
    items = msgspec.json.decode(raw).get("items") or []
    work = partial(conversations.create, id=id, tenant=tenant, metadata=body.metadata or {}, items=items)
    await add_stored(app, request, len(raw), work)
    return json_response((await conversations.existing(store, id, tenant)).shown())


async def get(app: AppState, request: Request) -> Response:
    _, found = await _asked(app, request)
    return json_response(found.shown())


async def update(app: AppState, request: Request) -> Response:
    store, found = await _asked(app, request)
    body = await app.decode(request, await app.body(request), ConversationUpdate)
    grown = len(msgspec.json.encode(body.metadata)) - len(msgspec.json.encode(found.metadata))
    work = partial(conversations.update, id=found.id, metadata=body.metadata)
    await (add_stored(app, request, grown, work) if grown > 0 else store.write(work))
    return json_response((await conversations.existing(store, found.id, tenant_of(request))).shown())


async def delete(app: AppState, request: Request) -> Response:
    store, found = await _asked(app, request)
    await store.write(partial(conversations.delete, id=found.id))
    return json_response({"id": found.id, "object": "conversation.deleted", "deleted": True})


async def list_items(app: AppState, request: Request) -> Response:
    store, found = await _asked(app, request)
    return json_response(await conversations.page_of(store, found.id, request.query_params))


async def add_items(app: AppState, request: Request) -> Response:
    _, found = await _asked(app, request)
    raw = await app.body(request)
    await app.decode(request, raw, ItemsRequest)
    work = partial(conversations.add, id=found.id, items=msgspec.json.decode(raw)["items"], nonce=secrets.token_hex(8))
    added = await add_stored(app, request, len(raw), work)
    return json_response(conversations.page(added, {"order": "asc", "limit": str(conversations.MAX_PAGE)}))


async def get_item(app: AppState, request: Request) -> Response:
    store, found = await _asked(app, request)
    item = await store.read(partial(conversations.item, id=found.id, name=request.path_params["item"]))
    if item is None:
        raise _no_item(request)
    return json_response(item)


async def delete_item(app: AppState, request: Request) -> Response:
    store, found = await _asked(app, request)
    if not await store.write(partial(conversations.delete_item, id=found.id, name=request.path_params["item"])):
        raise _no_item(request)
    return json_response(found.shown())


def _no_item(request: Request) -> NotFound:
    return NotFound(f"there is no item {request.path_params['item']!r:.80} in the conversation", code="item_not_found")


async def _asked(app: AppState, request: Request) -> tuple[Store, Conversation]:
    store = store_of(app).store
    return store, await conversations.existing(store, request.path_params["id"], tenant_of(request))
