"""Describes the routes of a server with a store (--store) for /openapi.json.

These are responses by id, conversations, resumed streams, files and batches.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from frontend.api.anthropic.batches import MessageBatchRequest
from frontend.api.openai.batches import BatchRequest
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


# Files and batches.


class FileObject(ResponseModel):
    id: str
    object: Literal["file"]
    bytes: Size
    created_at: Size
    expires_at: Size | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(ResponseModel):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(ResponseModel):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchError(ResponseModel):
    code: str
    line: Size | None
    message: str
    param: str | None


class BatchErrors(ResponseModel):
    object: Literal["list"]
    data: list[BatchError]


class BatchCounts(ResponseModel):
    total: Size
    completed: Size
    failed: Size


class BatchObject(ResponseModel):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: Size
    expires_at: Size
    in_progress_at: Size | None
    finalizing_at: Size | None
    completed_at: Size | None
    failed_at: Size | None
    expired_at: Size | None
    cancelling_at: Size | None
    cancelled_at: Size | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(ResponseModel):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageBatchCounts(ResponseModel):
    processing: Size
    succeeded: Size
    errored: Size
    canceled: Size
    expired: Size


class MessageBatch(ResponseModel):
    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None
    results_url: str | None


class MessageBatchList(ResponseModel):
    data: list[MessageBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageBatchDeleted(ResponseModel):
    id: str
    type: Literal["message_batch_deleted"]


BATCH_REQUESTS: Mapping[str, type[RequestModel]] = {
    "BatchRequest": BatchRequest, "MessageBatchRequest": MessageBatchRequest,
}  # fmt: skip
BATCH_RESPONSES: Mapping[str, Any] = {
    one.__name__: one
    for one in (
        FileObject, FileList, FileDeleted, BatchObject, BatchList, MessageBatch, MessageBatchList, MessageBatchDeleted,
    )
}  # fmt: skip
_NAMED = {"parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]}
_FORM = {
    "type": "object", "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}  # fmt: skip


def batch_paths(post: Describe, get: Describe, ref: Callable[[str], dict[str, str]]) -> dict[str, Any]:
    """Returns the descriptions by path.

    post, get: functions that describe one route
    ref: a function that refers to a type by name
    """

    def errors(format: str) -> dict[str, Any]:
        return {
            str(status): {"description": reason, "content": _json(ref(format))}
            for status, reason in (
                (400, "Malformed, or not possible in the batch's state"),
                (404, "Nothing of that name, or this server keeps no answers"), (503, "The store cannot be used now"),
            )
        }  # fmt: skip

    def one(summary: str, content: dict[str, Any], format: str, *query: str, method: str = "get") -> dict[str, Any]:
        described = get(summary, content, errors(format))["get"]
        asked = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in query]
        return {method: described | ({"parameters": asked} if asked else {})}

    ours, theirs = "OpenAIError", "AnthropicError"
    file, batch, message = (_json(ref(name)) for name in ("FileObject", "BatchObject", "MessageBatch"))
    raw = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    lines = {"application/x-jsonl": {"schema": {"type": "string"}}}
    upload = one("Upload a file for a batch", file, ours, method="post")
    upload["post"]["operationId"] = "FileUpload"
    upload["post"]["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
    for status, reason in (("413", "The file is too large, or the key's share of the store"), ("415", "No form")):
        upload["post"]["responses"][status] = {"description": reason, "content": _json(ref(ours))}
    return {
        "/v1/files": {
            **upload, **one("The files", _json(ref("FileList")), ours, "after", "limit", "order", "purpose"),
        },
        "/v1/files/{id}": {
            **one("A file", file, ours),
            **one("Delete a file", _json(ref("FileDeleted")), ours, method="delete"), **_NAMED,
        },
        "/v1/files/{id}/content": one("The bytes of a file", raw, ours) | _NAMED,
        "/v1/batches": {
            **post("Answer the lines of a file", "BatchRequest", "BatchObject", ref(ours)),
            **one("The batches", _json(ref("BatchList")), ours, "after", "limit"),
        },
        "/v1/batches/{id}": one("A batch", batch, ours) | _NAMED,
        "/v1/batches/{id}/cancel": one("End a batch", batch, ours, method="post") | _NAMED,
        "/v1/messages/batches": {
            **post("Answer many messages", "MessageBatchRequest", "MessageBatch", ref(theirs)),
            **one(
                "The message batches", _json(ref("MessageBatchList")), theirs, "after_id", "before_id", "limit"
            ),
        },
        "/v1/messages/batches/{id}": {
            **one("A message batch", message, theirs),
            **one("Delete an ended message batch", _json(ref("MessageBatchDeleted")), theirs, method="delete"),
            **_NAMED,
        },
        "/v1/messages/batches/{id}/cancel": one("End a message batch", message, theirs, method="post") | _NAMED,
        "/v1/messages/batches/{id}/results": one("The results of an ended batch", lines, theirs) | _NAMED,
    }  # fmt: skip
