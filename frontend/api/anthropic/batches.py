"""Message batches in Anthropic's form: the request, the lines of results, and the object that is shown."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from frontend.errors import BadRequest, Internal
from frontend.kept import batches
from frontend.kept.batch_runner import Answer, LineReader
from frontend.kept.batches import Batch, Line
from frontend.schema.base import RequestModel
from frontend.schema.request_fields import doc

NAME = "anthropic"
ENDPOINT = "/v1/messages"
MAX_REQUESTS = 100_000  # Anthropic's limit
WINDOW_S = 86_400.0
CustomId = Annotated[str, Meta(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_-]{1,64}$")]


class BatchedMessage(RequestModel):
    """One request of a batch."""

    custom_id: Annotated[CustomId, doc("Names the request in the results")]
    params: Annotated[dict[str, Any], doc("The body of a request to /v1/messages")]


class MessageBatchRequest(RequestModel):
    requests: Annotated[
        Annotated[list[BatchedMessage], Meta(min_length=1, max_length=MAX_REQUESTS)], doc("The requests")
    ]


def lines_of(request: MessageBatchRequest) -> list[tuple[int, str, bytes]]:
    """Returns the lines of a batch: number, custom id and body. Raises BadRequest, which names the field."""
    lines: list[tuple[int, str, bytes]] = []
    before = set[str]()
    for number, one in enumerate(request.requests):
        where = f"requests[{number}]"
        if one.custom_id in before:
            raise BadRequest(
                f"`{where}.custom_id` {one.custom_id!r:.80} is that of an earlier request", param=f"{where}.custom_id",
                code="duplicate_custom_id",
            )  # fmt: skip
        if one.params.get("stream"):
            raise BadRequest(
                f"`{where}.params.stream` has no use in a batch", param=f"{where}.params.stream", code="out_of_range"
            )
        before.add(one.custom_id)
        lines.append((number, one.custom_id, msgspec.json.encode(one.params)))
    return lines


@dataclass(frozen=True)
class Format:
    """See kept/batch_runner.py."""

    def reader(self, batch: Batch) -> LineReader:
        raise Internal("a message batch has no input file")

    def answered(self, line: Line, answer: Answer) -> bytes:
        body = msgspec.Raw(answer.body)
        if answer.status == 200:
            return _result(line.custom_id, {"type": "succeeded", "message": body})
        return _result(line.custom_id, {"type": "errored", "error": body})

    def unanswered(self, batch: str, number: int, custom_id: str, state: str) -> bytes:
        return _result(custom_id, {"type": {batches.DROPPED: "canceled", batches.LATE: "expired"}[state]})


def _result(custom_id: str, result: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"custom_id": custom_id, "result": result}) + b"\n"


COUNTS = {
    "processing": batches.WAITING, "succeeded": batches.SUCCEEDED, "errored": batches.ERRORED,
    "canceled": batches.DROPPED, "expired": batches.LATE,
}  # fmt: skip


def shown(one: Batch, url: str) -> dict[str, Any]:
    """Returns a batch as Anthropic shows it. url: the server's, before /v1"""
    ended = one.ended is not None
    cancelled = one.times.get(batches.CANCELLING)
    return {
        "id": one.id, "type": "message_batch",
        "processing_status": "ended" if ended else "canceling" if cancelled else "in_progress",
        "request_counts": {name: one.counts.get(state, 0) for name, state in COUNTS.items()},
        "created_at": _time(one.created), "expires_at": _time(one.expires),
        "ended_at": None if one.ended is None else _time(one.ended),
        "cancel_initiated_at": None if cancelled is None else _time(cancelled), "archived_at": None,
        "results_url": f"{url}/v1/messages/batches/{one.id}/results" if ended else None,
    }  # fmt: skip


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
