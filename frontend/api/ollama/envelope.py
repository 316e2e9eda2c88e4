"""The common parts of all responses of Ollama's API: model names, first and last fields, errors."""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from frontend.api import model_context
from frontend.api.model_context import ModelContext
from frontend.api.ollama import response_types as types
from frontend.api.ollama.options import AnswerFields, Asked
from frontend.api.receipts.receipt import receipt_of
from frontend.api.requests.encoding import to_json
from frontend.api.response_context import ResponseContext
from frontend.errors import NotFound, SluiceError, api_status
from frontend.request import Delta, Finish, Usage
from shared.messages import Timings

TAG = ":latest"
status = api_status
FINISH: dict[Finish, types.DoneReason] = {Finish.EOS: "stop", Finish.STOP: "stop", Finish.LENGTH: "length"}


def check_model(name: str, context: ModelContext) -> None:
    """Raises NotFound for a model that is not served. The tag `:latest` may be omitted or added."""
    for known in (name, name.removesuffix(TAG) or name, name + TAG):
        with suppress(SluiceError):
            return model_context.check_model(known, context)
    raise NotFound(f"model '{name}' not found", param="model", code="model_not_found")


def tagged(name: str) -> str:
    """Returns the name with a tag, as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else name + TAG


def rfc3339(seconds: float) -> str:
    """Returns a time as RFC 3339 text. seconds: since 1970"""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def head(context: ResponseContext) -> dict[str, str]:
    """Returns the first fields of every object of a response."""
    asked: Asked = context.request.format_data
    return {"model": asked.model, "created_at": rfc3339(context.created)}


def loaded(request: AnswerFields, make: Callable[[dict[str, Any]], types.OllamaAnswer]) -> bytes:
    """Returns the response to a request that only loads the model or, with `keep_alive` 0, unloads it.

    A server with one model has nothing to do. With many models, the route has done the loading (ModelTable.usable).
    """
    unload = request.keep_alive in (0, "0")
    fields = {"model": request.model, "created_at": rfc3339(int(time.time()))}
    return to_json(make(fields | {"done": True, "done_reason": "unload" if unload else "load"})) + b"\n"


def end(context: ResponseContext, delta: Delta, usage: Usage) -> dict[str, Any]:
    """Returns the fields that only the last object of a response has. The times were measured by the worker."""
    times = delta.timings or Timings()
    return {
        "done": True,
        "done_reason": FINISH[delta.finish or Finish.LENGTH],
        "total_duration": _ns(times.queue_ms + times.prefill_ms + times.decode_ms),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _ns(times.prefill_ms),
        "eval_count": usage.completion_tokens,
        "eval_duration": _ns(times.decode_ms),
        "receipt": receipt_of(context, delta),
    }


def error(exc: SluiceError, request_id: str) -> bytes:
    return to_json(types.OllamaError(error=exc.message))


def stream_error(exc: SluiceError, request_id: str, context: ResponseContext) -> bytes:
    """Encodes the line that ends a failed stream. No line with `done` follows."""
    return error(exc, request_id) + b"\n"


def _ns(ms: float) -> int:
    return round(ms * 1e6)
