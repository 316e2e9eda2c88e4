"""Errors in llama.cpp's format: an object with the HTTP status as `code`, a message and a type."""

from collections.abc import Mapping

from msgspec import UNSET

from frontend.api.llama_cpp import response_types as types
from frontend.api.requests.encoding import to_json
from frontend.api.response_context import ResponseContext
from frontend.errors import ContextLengthExceeded, SluiceError, api_status

TYPES: Mapping[str, str] = {"overloaded_error": "unavailable_error", "internal_error": "server_error"}
status = api_status


def error(exc: SluiceError, request_id: str) -> bytes:
    return to_json(types.LlamaCppError(error=_body(exc)))


def stream_error(exc: SluiceError, request_id: str, context: ResponseContext) -> bytes:
    """Encodes the event that ends a failed stream. No event with `"stop": true` follows."""
    return b"data: " + error(exc, request_id) + b"\n\n"


def _body(exc: SluiceError) -> types.LlamaCppErrorBody:
    if isinstance(exc, ContextLengthExceeded):
        asked = f"at least {exc.prompt}" if exc.at_least else f"{exc.prompt}"
        return types.LlamaCppErrorBody(
            code=status(exc),
            message=f"the request exceeds the available context size: it has {asked} tokens, and there are {exc.limit}",
            type="exceed_context_size_error",
            param=exc.param or UNSET,
            n_prompt_tokens=exc.prompt,
            n_ctx=exc.limit,
        )
    kind = TYPES.get(exc.kind, exc.kind)
    return types.LlamaCppErrorBody(code=status(exc), message=exc.message, type=kind, param=exc.param or UNSET)
