"""The access log: a line for each request that has ended, with its tenant, its outcome and its times.

Contains no prompt, no text and no key. A thread writes the lines (shared/log.py), so that a full disk or a
pipe without a reader costs lines and never delays a stream.
"""

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from frontend.generation.generation import Choice, Generation
from frontend.generation.service import Windows
from frontend.server.middleware import RequestRecord
from shared.config.frontend import FrontendConfig
from shared.log import NonBlockingWriter
from shared.messages import Timings

OUTCOMES = {
    "": "finished", "client": "client_gone", "deadline_exceeded": "deadline", "shutdown": "shutdown",
    "write_timeout": "write_timeout",
}  # fmt: skip
MAX_FINISH_REASONS = 128  # limit on the finish reasons in one line
NO_TIMINGS = Timings()

_encode = msgspec.json.Encoder().encode
# Paths of probes, of scrapes and of the web page. A successful request for them is not logged.
QUIET_PATHS = frozenset({
    "/", "/health", "/v1/health", "/ready", "/ping", "/stats", "/metrics", "/load", "/version", "/favicon.ico",
    "/slots", "/health_generate",
})  # fmt: skip


class LogEntry(msgspec.Struct, gc=False):
    """A request in the log. Fields that do not apply are None; times are in milliseconds."""

    time: str
    request_id: str
    method: str
    path: str
    status: int | None  # None: the client had left before a response
    outcome: str
    error: str | None
    key: str | None  # name of the API key
    total_ms: float
    dialect: str | None = None  # name of the API format
    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    ttft_ms: float | None = None
    finish_reasons: list[str | None] | None = None


def entry_of(record: RequestRecord) -> LogEntry:
    """Returns the log entry of a request that ends now."""
    entry = LogEntry(
        datetime.now(UTC).isoformat(timespec="milliseconds"), record.request_id, record.method, record.path,
        record.status, record.outcome or "finished", record.error, record.tenant or None,
        round(1e3 * (time.perf_counter() - record.began_at), 3), record.api_format,
    )  # fmt: skip
    generation_request, generation = record.generation_request, record.generation
    if generation_request is not None:
        entry.model, entry.stream, entry.n = generation_request.model, generation_request.stream, generation_request.n
        entry.prompt_tokens = generation_request.prompt_tokens
    if generation is not None:
        _add_generation(entry, generation, record.began_at)
    return entry


def _add_generation(entry: LogEntry, generation: Generation | Windows, began_at: float) -> None:
    if generation.reason or entry.outcome == "finished":
        entry.outcome = OUTCOMES.get(generation.reason, "error")
    if generation.reason and entry.outcome != "client_gone":
        entry.error = generation.reason
    choices = generation.choices
    if not choices:
        return
    timings = [_timings(choice) for choice in choices]
    entry.completion_tokens = sum([choice.consumed for choice in choices])
    each = entry.n or 1  # choices of one prompt count its cached tokens once
    cached = [timing.cached_tokens for timing in timings]
    entry.cached_tokens = sum([min(cached[at : at + each]) for at in range(0, len(cached), each)])
    entry.queue_ms = round(max([timing.queue_ms for timing in timings]), 3)  # the slowest choice's time
    entry.prefill_ms = round(max([timing.prefill_ms for timing in timings]), 3)
    entry.decode_ms = round(max([timing.decode_ms for timing in timings]), 3)
    first = min([choice.first_at for choice in choices if choice.first_at], default=0.0)
    entry.ttft_ms = round(1e3 * (first - began_at), 3) if first else None
    entry.finish_reasons = [choice.finish.value if choice.finish else None for choice in choices[:MAX_FINISH_REASONS]]


def _timings(choice: Choice) -> Timings:
    """Returns the times in the worker's End or, if the frontend ended the choice, those sent with the first token."""
    end = choice.stream.end
    return choice.timings(end if end is not None and end.timings != NO_TIMINGS else None)


def as_json(entry: LogEntry) -> bytes:
    """Encodes an entry as a line of JSON."""
    return _encode(entry) + b"\n"


def as_text(entry: LogEntry) -> bytes:
    """Encodes an entry as a line for people."""
    path = entry.path if entry.path.isprintable() else ascii(entry.path)
    clock = time.strftime("%H:%M:%S")
    line = f"{clock} INFO    {entry.method} {path} {entry.status or '-'} {entry.outcome}"
    if entry.error:
        line += f" ({entry.error})"
    if entry.completion_tokens is not None:
        line += f", {entry.prompt_tokens} + {entry.completion_tokens} tokens"
    if entry.ttft_ms is not None:
        line += f", first after {entry.ttft_ms:.0f} ms"
    line += f", {entry.total_ms:.0f} ms"
    return f"{line}, {entry.key + ', ' if entry.key else ''}{entry.request_id}\n".encode()


class AccessLog:
    """Renders entries and gives them to a NonBlockingWriter."""

    def __init__(self, render: Callable[[LogEntry], bytes], writer: NonBlockingWriter) -> None:
        self.writer = writer
        self._render = render

    def __call__(self, entry: LogEntry) -> None:
        """Writes the entry, unless a successful request was for a path in QUIET_PATHS or a file of the web page."""
        if entry.outcome != "finished" or not (entry.path in QUIET_PATHS or entry.path.startswith("/web/")):
            self.writer.put(self._render(entry))

    def close(self) -> None:
        self.writer.close()


def access_log(config: FrontendConfig) -> AccessLog | None:
    """Opens the log of `--access-log`: `text` on stderr among log lines of level info, or `json` on stdout.

    With `--log-format json`, the lines on stderr are JSON, too.
    """
    if config.access_log == "json":
        return AccessLog(as_json, NonBlockingWriter.to(sys.__stdout__.fileno() if sys.__stdout__ else 1))
    if config.access_log == "text" and config.log_level in ("debug", "info"):
        render = as_json if config.log_format == "json" else as_text
        return AccessLog(render, NonBlockingWriter.to(sys.__stderr__.fileno() if sys.__stderr__ else 2))
    return None
