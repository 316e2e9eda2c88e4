"""The record of requests (`--record`): a line for each generating request that has ended, see shared/logs/record.py.

Contains no key and no header. Prompts and answers are hashes, unless --record-text asks for them. A thread writes the
lines, so that a full disk costs lines and never delays a stream; each line says how many lines were lost before it.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import msgspec

from frontend.generation.generation import Generation
from frontend.observability.access_log import LogEntry, RequestRecord
from frontend.observability.record_files import RecordFiles
from shared.config import ConfigError
from shared.logs.line_writer import NonBlockingWriter
from shared.logs.record import VERSION, RecordedRequest, hash_of
from shared.messages import Sampling
from shared.wire.codec import pack_u32

log = logging.getLogger("sluice.frontend")

MAX_PENDING_BYTES = 64 << 20
# Fields of Sampling that say nothing about texts.
NUMBERS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens", "ignore_eos", "logprobs",
)  # fmt: skip

ONE_LINE = bytes.maketrans(b"\r\n", b"  ")

_encode = msgspec.json.Encoder().encode


class Recorder:
    """Writes the record; called with each request that has ended."""

    def __init__(self, put: Callable[[bytes], None], dropped: Callable[[], int], close: Callable[[], None]) -> None:
        self._put, self._dropped, self.close = put, dropped, close

    @classmethod
    def to(cls, file: str, max_bytes: int, count: int) -> Self:
        """Opens the file, to which several frontends may write. Raises ConfigError if it cannot be written.

        max_bytes, count: see RecordFiles
        """
        try:
            files = RecordFiles(file, max_bytes, count)
        except OSError as error:
            raise ConfigError(f"--record {file} cannot be written: {error.strerror}") from error
        writer = NonBlockingWriter(files.write, MAX_PENDING_BYTES)

        def close() -> None:
            writer.close()
            files.close()
            if writer.dropped:
                log.warning("--record %s lacks %d requests, which could not be written in time", file, writer.dropped)

        return cls(writer.put, lambda: writer.dropped, close)

    def __call__(self, entry: LogEntry, record: RequestRecord) -> None:
        if record.generation_request is not None and isinstance(record.generation, Generation | None):
            self._put(_encode(line_of(entry, record, self._dropped())) + b"\n")


def line_of(entry: LogEntry, record: RequestRecord, lost: int) -> RecordedRequest:
    """Returns the line of a request that was parsed. lost: how many lines before this one could not be written"""
    request, generation = record.generation_request, record.generation
    assert request is not None
    choices = generation.choices if generation else ()
    began = datetime.now(UTC) - timedelta(milliseconds=entry.total_ms)
    return RecordedRequest(
        VERSION, began.isoformat(timespec="milliseconds"), entry.request_id, entry.path, entry.status, entry.outcome,
        entry.total_ms, entry.ttft_ms, entry.error, record.fingerprint, request.model, request.stream, request.n,
        _numbers(request.sampling), [hash_of(pack_u32(prompt)) for prompt in request.prompts],
        entry.prompt_tokens or 0, entry.cached_tokens or 0, entry.completion_tokens or 0,
        [choice.stream.seed for choice in choices],
        [hash_of(pack_u32(choice.stream.output[: choice.consumed])) for choice in choices],
        [choice.finish.value if choice.finish else None for choice in choices],
        _on_one_line(record.body), b"".join(record.answer).decode(), lost,
    )  # fmt: skip


def _numbers(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in NUMBERS}


def _on_one_line(body: bytes) -> msgspec.Raw | None:
    """Returns a JSON body without line breaks; None if it is empty."""
    if not body:
        return None
    # A line break outside a string is white space, and JSON allows none within a string.
    return msgspec.Raw(body.translate(ONE_LINE))
