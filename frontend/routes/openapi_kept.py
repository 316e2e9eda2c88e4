"""Describes the routes of kept answers (--store) for /openapi.json: responses by id, conversations, resumed streams."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from frontend.routes.conversations import ConversationRequest, ConversationUpdate, ItemsRequest
from frontend.schema.base import RequestModel, ResponseModel
from frontend.schema.responses import Size


class Deleted(ResponseModel):
    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: bool


class ConversationObject(ResponseModel):
    id: str
    object: Literal["conversation"]
    created_at: Size
    metadata: dict[str, str]


class ItemList(ResponseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ListedStream(ResponseModel):
    id: str
    object: Literal["stream"]
    created_at: Size
    path: str
    model: str | None
    status: str
    question: str


class StreamList(ResponseModel):
    object: Literal["list"]
    data: list[ListedStream]


KEPT_REQUESTS: Mapping[str, type[RequestModel]] = {
    "ConversationRequest": ConversationRequest,
    "ConversationUpdate": ConversationUpdate,
    "ItemsRequest": ItemsRequest,
}
KEPT_RESPONSES: Mapping[str, Any] = {
    "Deleted": Deleted, "ConversationObject": ConversationObject, "ItemList": ItemList,
    "ListedStream": ListedStream, "StreamList": StreamList,
}  # fmt: skip
Describe = Callable[..., dict[str, Any]]
_NAME = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}


def kept_paths(post: Describe, get: Describe, ref: Callable[[str], dict[str, str]]) -> dict[str, Any]:
    """Returns the descriptions by path.

    post, get: functions that describe one route
    ref: a function that refers to a type by name
    """
    error = ref("OpenAIError")
    events = {"text/event-stream": {"x-event-data": {"anyOf": [ref("ResponseEvent"), error]}}}
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    missing = {
        str(status): {"description": reason, "content": _json(error)}
        for status, reason in (
            (400, "A query parameter is malformed"), (404, "Nothing of that name, or this server keeps no answers"),
            (503, "The store cannot be used now, or the answer cannot be continued now"),
        )
    }  # fmt: skip

    def one(summary: str, content: dict[str, Any], *query: str, method: str = "get") -> dict[str, Any]:
        described = get(summary, content, missing)["get"]
        return {method: described | {"parameters": [_query(name) for name in query]}} if query else {method: described}

    named = {"parameters": [_NAME]}
    pages = ("after", "limit", "order")
    shown, deleted, items = _json(ref("Response")), _json(ref("Deleted")), _json(ref("ItemList"))
    conversation = _json(ref("ConversationObject"))
    again = "The stream of an answer with that `X-Conversation-Id`, from a byte or after `Last-Event-ID`"
    ended = "End the answer and forget its stream"
    return {
        "/v1/responses/{id}": {
            **one("A kept response, or its events again", shown | events, "stream", "starting_after"),
            **one("Delete a kept response", deleted, method="delete"), **named,
        },
        "/v1/responses/compact": {"post": refused("Refused: a summary needs a prompt of the client", error)},
        "/v1/responses/{id}/cancel": one("End a response that runs in the background", shown, method="post") | named,
        "/v1/responses/{id}/input_items": one("The items of a kept response's input", items, *pages) | named,
        "/v1/conversations": post("Make a conversation", "ConversationRequest", "ConversationObject", error),
        "/v1/conversations/{id}": {
            **one("A conversation", conversation),
            **post("Change a conversation's metadata", "ConversationUpdate", "ConversationObject", error),
            **one("Delete a conversation", deleted, method="delete"), **named,
        },
        "/v1/conversations/{id}/items": {
            **one("The items of a conversation", items, *pages),
            **post("Add items to a conversation", "ItemsRequest", "ItemList", error), **named,
        },
        "/v1/conversations/{id}/items/{item}": {
            **one("An item of a conversation", _json({"type": "object"})),
            **one("Delete an item of a conversation", conversation, method="delete"),
            "parameters": [_NAME, _NAME | {"name": "item"}],
        },
        "/v1/streams": get("The newest answers of the key whose streams have an id", _json(ref("StreamList")), missing),
        "/v1/stream": {**one(again, stream, "conv_id", "from"), **_emptied(one(ended, {}, "conv_id", method="delete"))},
        "/v1/stream/{id}": {**one(again, stream, "from"), **_emptied(one(ended, {}, method="delete")), **named},
    }  # fmt: skip


def refused(summary: str, error: dict[str, str]) -> dict[str, Any]:
    """Describes a route that is always answered with 501."""
    said = {"application/json": {"schema": error}}
    texts = {"401": "The key is missing or wrong", "501": "Not supported, and why"}
    return {
        "summary": summary,
        "responses": {status: {"description": it, "content": said} for status, it in texts.items()},
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _query(name: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": "string"}}


def _emptied(described: dict[str, Any]) -> dict[str, Any]:
    """Returns the description of a DELETE without a body in its response, which also succeeds where nothing was."""
    answers = {status: one for status, one in described["delete"]["responses"].items() if status not in ("200", "404")}
    return {"delete": described["delete"] | {"responses": {"204": {"description": "Done"}, **answers}}}
