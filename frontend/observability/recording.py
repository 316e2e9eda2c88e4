"""The record of requests (`--record`): a line for each generating request that has ended, see shared/record.py.

Contains no key and no header. Prompts and answers are hashes, unless --record-text asks for them. A thread writes the
lines, so that a full disk costs lines and never delays a stream; each line says how many were lost before it.
"""

import json
import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import msgspec

from frontend.generation.generation import Generation
from frontend.observability.access_log import LogEntry, RequestRecord
from frontend.request import Delta
from frontend.server.sse import StreamWriter
from shared.codec import pack_u32
from shared.config import ConfigError
from shared.line_writer import NonBlockingWriter
from shared.messages import Sampling
from shared.record import VERSION, RecordedRequest, hash_of

log = logging.getLogger("sluice.frontend")

MAX_PENDING_BYTES = 64 << 20
# Fields of Sampling that say nothing about texts.
NUMBERS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens", "ignore_eos", "logprobs",
)  # fmt: skip

_encode = msgspec.json.Encoder().encode


class RecordedWriter:
    """A StreamWriter that keeps what another one writes."""

    def __init__(self, writer: StreamWriter, kept: list[bytes]) -> None:
        self._writer, self._kept = writer, kept

    def write(self, deltas: list[Delta]) -> bytes:
        data = self._writer.write(deltas)
        self._kept.append(data)
        return data

    def end(self) -> bytes:
        data = self._writer.end()
        self._kept.append(data)
        return data


class Recorder:
    """Writes the record; called with each request that has ended."""

    def __init__(self, put: Callable[[bytes], None], dropped: Callable[[], int], close: Callable[[], None]) -> None:
        self._put, self._dropped, self.close = put, dropped, close

    @classmethod
    def to(cls, file: str) -> Self:
        """Opens the file, to which several frontends may write. Raises ConfigError if it cannot be written."""
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--record {file} cannot be written: {error.strerror}") from error
        writer = NonBlockingWriter(descriptor, MAX_PENDING_BYTES)

        def close() -> None:
            writer.close()
            os.close(descriptor)
            if writer.dropped:
                log.warning("--record %s lacks %d requests, which could not be written in time", file, writer.dropped)

        return cls(writer.put, lambda: writer.dropped, close)

    def __call__(self, entry: LogEntry, record: RequestRecord) -> None:
        if record.generation_request is not None and isinstance(record.generation, Generation | None):
            self._put(_encode(line_of(entry, record, self._dropped())) + b"\n")


def line_of(entry: LogEntry, record: RequestRecord, lost: int) -> RecordedRequest:
    """Returns the line of a request that has been read. lost: how many lines before it could not be written"""
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
    """Returns the body for a line of JSON."""
    if not body:
        return None
    return msgspec.Raw(json.dumps(json.loads(body)).encode() if b"\n" in body else body)
