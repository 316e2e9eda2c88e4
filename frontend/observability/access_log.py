"""The access log: a line for each request that has ended, with its owner, its outcome and its times.

Knows no prompt, no text and no key. A line is made once a request and written by a thread (shared/line_writer.py), so
that a full disk or a pipe that nobody reads costs lines and never a stream.
"""

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from frontend.errors import DeadlineExceeded, Overloaded, SluiceError
from frontend.generation.choice import Choice
from frontend.generation.generation import Generation
from frontend.request import GenerationRequest
from shared.config import FrontendConfig
from shared.line_writer import NonBlockingWriter
from shared.messages import Timings

OUTCOMES = {
    "": "finished", "client": "client_gone", "deadline_exceeded": "deadline", "shutdown": "shutdown",
    "write_timeout": "write_timeout",
}  # fmt: skip
MOST_REASONS = 128
NOTHING = Timings()

_encode = msgspec.json.Encoder().encode
QUIET = frozenset({"/", "/health", "/ready", "/stats", "/metrics"})  # not in the text log while all is well


class RequestRecord:
    """One HTTP request on its way; the border begins and ends it, the route adds what it knows."""

    __slots__ = (
        "began", "dialect", "error", "generation", "generation_request", "method", "outcome", "path",
        "request_id", "status", "tenant", "trace",
    )  # fmt: skip

    def __init__(self, request_id: str, method: str, path: str, trace: str) -> None:
        self.began = time.perf_counter()
        self.request_id = request_id
        self.method = method
        self.path = path[:256]
        self.trace = trace  # the W3C traceparent that came with it
        self.tenant = ""
        self.status: int | None = None
        self.outcome = ""  # how it ended, where there is no run that knows
        self.error: str | None = None
        self.dialect: str | None = None
        self.generation_request: GenerationRequest | None = None
        self.generation: Generation | None = None

    def failed(self, error: SluiceError) -> None:
        self.error = error.code or error.kind
        if isinstance(error, DeadlineExceeded):
            self.outcome = "deadline"
        else:
            self.outcome = "refused" if error.status < 500 or isinstance(error, Overloaded) else "error"


class LogEntry(msgspec.Struct, gc=False):
    """A request in the log; what has no meaning for it is None. Times in milliseconds."""

    time: str
    request_id: str
    method: str
    path: str
    status: int | None  # None: nobody was there to be answered
    outcome: str
    error: str | None
    key: str | None
    total_ms: float
    dialect: str | None = None
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


def entry_of(exchange: RequestRecord) -> LogEntry:
    """Of an exchange that ends now."""
    entry = LogEntry(
        datetime.now(UTC).isoformat(timespec="milliseconds"), exchange.request_id, exchange.method, exchange.path,
        exchange.status, exchange.outcome or "finished", exchange.error, exchange.tenant or None,
        round(1e3 * (time.perf_counter() - exchange.began), 3), exchange.dialect,
    )  # fmt: skip
    generation_request, generation = exchange.generation_request, exchange.generation
    if generation_request is not None:
        entry.model, entry.stream, entry.n = generation_request.model, generation_request.stream, generation_request.n
        entry.prompt_tokens = sum(map(len, generation_request.prompts))
    if generation is not None:
        _add_generation(entry, generation, exchange.began)
    return entry


def _add_generation(entry: LogEntry, generation: Generation, began: float) -> None:
    if generation.reason or entry.outcome == "finished":
        entry.outcome = OUTCOMES.get(generation.reason, "error")
    if generation.reason and entry.outcome != "client_gone":
        entry.error = generation.reason
    choices = generation.choices
    timings = [_timings(choice) for choice in choices]
    entry.completion_tokens = sum([choice.consumed for choice in choices])
    each = entry.n or 1  # choices of one prompt: it counts once, and so does what was found of it
    cached = [timing.cached_tokens for timing in timings]
    entry.cached_tokens = sum([min(cached[at : at + each]) for at in range(0, len(cached), each)])
    entry.queue_ms = round(max([timing.queue_ms for timing in timings]), 3)  # of the slowest choice
    entry.prefill_ms = round(max([timing.prefill_ms for timing in timings]), 3)
    entry.decode_ms = round(max([timing.decode_ms for timing in timings]), 3)
    first = min([choice.first_at for choice in choices if choice.first_at], default=0.0)
    entry.ttft_ms = round(1e3 * (first - began), 3) if first else None
    entry.finish_reasons = [choice.finish.value if choice.finish else None for choice in choices[:MOST_REASONS]]


def _timings(choice: Choice) -> Timings:
    """The worker's, or what it had sent by the first token where the frontend ended the choice."""
    end = choice.stream.end
    return choice.timings(end if end is not None and end.timings != NOTHING else None)


def as_json(entry: LogEntry) -> bytes:
    """For machines."""
    return _encode(entry) + b"\n"


def as_text(entry: LogEntry) -> bytes:
    """For people; empty for a successful request that only looks after the server."""
    if entry.outcome == "finished" and (entry.path in QUIET or entry.path.startswith("/web/")):
        return b""
    path = entry.path if entry.path.isprintable() else ascii(entry.path)
    clock = time.strftime("%H:%M:%S")
    said = f"{clock} INFO    {entry.method} {path} {entry.status or '-'} {entry.outcome}"
    if entry.error:
        said += f" ({entry.error})"
    if entry.completion_tokens is not None:
        said += f", {entry.prompt_tokens} + {entry.completion_tokens} tokens"
    if entry.ttft_ms is not None:
        said += f", first after {entry.ttft_ms:.0f} ms"
    said += f", {entry.total_ms:.0f} ms"
    return f"{said}, {entry.key + ', ' if entry.key else ''}{entry.request_id}\n".encode()


class AccessLog:
    """Writes entries to an outlet, and now and then how many were lost."""

    def __init__(self, render: Callable[[LogEntry], bytes], outlet: NonBlockingWriter) -> None:
        self.outlet = outlet
        self._render = render

    def __call__(self, entry: LogEntry) -> None:
        if data := self._render(entry):
            self.outlet.put(data)

    def close(self) -> None:
        self.outlet.close()


def access_log(config: FrontendConfig) -> AccessLog | None:
    """As `--access-log` has it: `text` beside the other log lines, if info is among them; `json` on stdout."""
    if config.access_log == "json":
        return AccessLog(as_json, NonBlockingWriter(sys.__stdout__.fileno() if sys.__stdout__ else 1))
    if config.access_log == "text" and config.log_level in ("debug", "info"):
        return AccessLog(as_text, NonBlockingWriter(sys.__stderr__.fileno() if sys.__stderr__ else 2))
    return None
