"""What is known of an HTTP request until it ends: the access log, metrics, traces and recordings are made of it."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from frontend.errors import DeadlineExceeded, Overloaded, SluiceError
from frontend.generation.generation import Generation
from frontend.generation.service import Windows
from frontend.request import GenerationRequest


def ignore() -> None:
    """Does nothing: the `release` of a record that keeps no body."""


class RequestRecord:
    """What is known of an HTTP request until it ends. The middleware creates the record, and the route adds to it."""

    __slots__ = (
        "admission", "answer", "api_format", "began_at", "body", "error", "fingerprint", "generation",
        "generation_request", "method", "outcome", "path", "release", "request_id", "status", "tenant", "trace",
    )  # fmt: skip

    def __init__(self, request_id: str, method: str, path: str, trace: str) -> None:
        self.began_at = time.perf_counter()
        self.request_id = request_id
        self.method = method
        self.path = path[:256]
        self.trace = trace  # the W3C traceparent header
        self.tenant = ""  # the name of the request's API key
        self.admission: Mapping[str, Any] = {}  # tenant and priority, as the request's headers say
        self.status: int | None = None
        self.outcome = ""  # how the request ended, if it has no generation
        self.error: str | None = None
        self.api_format: str | None = None
        self.generation_request: GenerationRequest | None = None
        self.generation: Generation | Windows | None = None
        self.fingerprint = ""
        self.body = b""  # the request's body; only with --record-text
        self.answer: list[bytes] = []  # pieces of the response's body; only with --record-text
        self.release: Callable[[], None] = ignore  # stops counting `body` when the request has ended

    def failed(self, error: SluiceError) -> None:
        self.error = error.code or error.kind
        if isinstance(error, DeadlineExceeded):
            self.outcome = "deadline"
        else:
            self.outcome = "refused" if error.status < 500 or isinstance(error, Overloaded) else "error"
