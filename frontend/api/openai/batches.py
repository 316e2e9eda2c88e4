"""Batches in OpenAI's form: the lines of an input file, the lines of output files, and the object that is shown."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from frontend.errors import BadRequest
from frontend.kept import batches
from frontend.kept.batch_runner import Answer
from frontend.kept.batches import Batch, Line
from frontend.schema.base import RequestModel
from frontend.schema.request_fields import KeptMetadata, check_metadata, doc

NAME = "openai"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_LINES = 50_000  # OpenAI's limit
MAX_ERRORS = 100  # how many wrong lines are named
MAX_CUSTOM_ID = 512  # characters
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000  # OpenAI's limits
WINDOW_S = 86_400.0  # 24h, the only window that OpenAI has


class ExpiresAfter(RequestModel):
    """When a file is deleted."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S), doc("Seconds after the file was made")]


class BatchRequest(RequestModel):
    input_file_id: Annotated[str, doc("A file with the purpose batch: one request a line")]
    endpoint: Annotated[Literal[ENDPOINTS], doc("The route of every line")]  # type: ignore[valid-type]
    completion_window: Annotated[Literal["24h"], doc("Lines without an answer after this time expire")]
    metadata: Annotated[KeptMetadata | None, doc("Kept and shown")] = None
    output_expires_after: Annotated[ExpiresAfter | None, doc("When the output files are deleted")] = None

    def __post_init__(self) -> None:
        check_metadata(self.metadata)


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Streams(msgspec.Struct):
    stream: Any = None
    background: Any = None


@dataclass
class LineReader:
    """Reads an input file, whose pieces may end anywhere.

    endpoint: the route that each line must be for
    max_line_bytes: limit on a line
    """

    endpoint: str
    max_line_bytes: int
    errors: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    _number: int = 0  # lines so far, empty ones included; the first is 1
    _rest: bytes = b""
    _ids: set[str] = field(default_factory=set)

    def feed(self, data: bytes, *, last: bool = False) -> list[tuple[int, str, bytes]]:
        """Returns the lines that are complete now: number, custom id, and compressed body."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if last:
            lines, self._rest = [*lines, self._rest], b""
        found = []
        for line in lines:
            self._number += 1
            if line.strip() and len(self.errors) < MAX_ERRORS:
                try:
                    found.append(self._read(line))
                except BadRequest as exc:
                    self._wrong(exc)
        if len(self._rest) > self.max_line_bytes:
            self._number += 1
            self._wrong(_too_long(self.max_line_bytes))
            self._rest = b""
        if last and not self.total and not self.errors:
            self._wrong(BadRequest("the file has no lines", code="empty_file"))
        return found

    def _wrong(self, exc: BadRequest) -> None:
        self.errors.append({"code": exc.code, "line": self._number or None, "message": exc.message, "param": exc.param})

    def _read(self, data: bytes) -> tuple[int, str, bytes]:
        """Reads a line. Raises BadRequest."""
        if len(data) > self.max_line_bytes:
            raise _too_long(self.max_line_bytes)
        if self.total >= MAX_LINES:
            raise BadRequest(f"a batch may have {MAX_LINES} lines", code="too_many_tasks")
        try:
            line = msgspec.json.decode(data, type=_Line)
            streams = msgspec.json.decode(line.body, type=_Streams)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequest(f"this is no request of a batch: {exc}", code="invalid_json_line") from None
        if line.method != "POST":
            raise BadRequest("`method` must be POST", param="method", code="invalid_method")
        if line.url != self.endpoint:
            raise BadRequest(
                f"`url` must be the batch's endpoint {self.endpoint}, not {line.url!r:.80}", param="url",
                code="mismatched_url",
            )  # fmt: skip
        check_custom_id(line.custom_id, self._ids)
        for name, value in (("stream", streams.stream), ("background", streams.background)):
            if value:
                raise BadRequest(f"`body.{name}` has no use in a batch", param=f"body.{name}", code="out_of_range")
        self._ids.add(line.custom_id)
        self.total += 1
        return self._number, line.custom_id, zlib.compress(bytes(line.body), 1)


def check_custom_id(id: str, before: set[str]) -> None:
    """Raises BadRequest for a custom id that is empty, too long, or one of those `before`."""
    if not 0 < len(id) <= MAX_CUSTOM_ID:
        raise BadRequest(
            f"`custom_id` must have 1 to {MAX_CUSTOM_ID} characters", param="custom_id", code="out_of_range"
        )
    if id in before:
        raise BadRequest(
            f"`custom_id` {id!r:.80} is that of an earlier line", param="custom_id", code="duplicate_custom_id"
        )


def _too_long(most: int) -> BadRequest:
    return BadRequest(f"the line is longer than {most} bytes (--max-body-bytes)", code="line_too_long")


def request_id(batch: str, number: int) -> str:
    """Returns the id of a line, which is also the id of its request in logs."""
    return f"batch_req_{batch.removeprefix('batch_')}_{number}"


_DROPPED: Mapping[str, dict[str, str]] = {
    batches.DROPPED: {
        "code": "batch_cancelled", "message": "This request was not executed before the batch was cancelled.",
    },
    batches.LATE: {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    """See kept/batch_runner.py. max_line_bytes: limit on a line of an input file"""

    max_line_bytes: int

    def reader(self, batch: Batch) -> LineReader:
        return LineReader(batch.endpoint, self.max_line_bytes)

    def answered(self, line: Line, answer: Answer) -> bytes:
        response = {
            "status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(answer.body),
        }  # fmt: skip
        return _output(line.batch, line.number, line.custom_id, response, None)

    def unanswered(self, batch: str, number: int, custom_id: str, state: str) -> bytes:
        return _output(batch, number, custom_id, None, _DROPPED[state])


def _output(batch: str, number: int, custom_id: str, response: Any, error: Any) -> bytes:
    line = {"id": request_id(batch, number), "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


TIMES = (
    batches.RUNNING, batches.FINALIZING, batches.COMPLETED, batches.FAILED, batches.EXPIRED, batches.CANCELLING,
    batches.CANCELLED,
)  # fmt: skip


def shown(one: Batch) -> dict[str, Any]:
    """Returns a batch as OpenAI shows it."""
    failed = sum(one.counts.get(state, 0) for state in batches.FAILED_LINES.split())
    return {
        "id": one.id, "object": "batch", "endpoint": one.endpoint,
        "errors": {"object": "list", "data": one.errors} if one.errors else None,
        "input_file_id": one.input_file, "completion_window": "24h", "status": one.status,
        "output_file_id": one.output_file or None, "error_file_id": one.error_file or None, "created_at": one.created,
        "expires_at": int(one.expires), **{f"{status}_at": one.times.get(status) for status in TIMES},
        "request_counts": {
            "total": one.total, "completed": one.counts.get(batches.SUCCEEDED, 0), "failed": failed,
        },
        "metadata": one.metadata,
    }  # fmt: skip
