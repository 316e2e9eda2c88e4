"""The envelope of an Anthropic response: head, usage, end and errors."""

from typing import Any

from frontend.api.common import ResponseContext, Totals, to_json
from frontend.errors import SluiceError, TooLarge
from frontend.request import Delta, Finish

PREFIX = "msg"
CACHES = "caches"  # GenerationRequest.format_data: whether the client marked what to cache
FINISH = {Finish.EOS: "end_turn", Finish.STOP: "stop_sequence", Finish.LENGTH: "max_tokens"}


def error(exc: SluiceError, request_id: str) -> bytes:
    fields: dict[str, Any] = {"type": _kind(exc), "message": exc.message}
    if exc.param == "thread":  # on this error the SDK's helpers continue without a thread
        fields["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return to_json({"type": "error", "error": fields, "request_id": request_id})


def stream_error(exc: SluiceError, request_id: str, context: ResponseContext) -> bytes:
    """The end of a failed stream: no message_stop follows."""
    return b"event: error\ndata: " + error(exc, request_id) + b"\n\n"


def _kind(exc: SluiceError) -> str:
    if isinstance(exc, TooLarge):
        return "request_too_large"
    if exc.code == "model_not_found":
        return "not_found_error"
    return "api_error" if exc.kind == "internal_error" else exc.kind


def event(name: bytes, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name, data)


def named(kind: str, **fields: Any) -> bytes:
    return event(kind.encode(), to_json({"type": kind, **fields}))


BLOCK_START = named("content_block_start", index=0, content_block={"type": "text", "text": ""})
PING = named("ping")
BLOCK_STOP = named("content_block_stop", index=0)
STOP = named("message_stop")
DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)


def text_delta(delta: Delta, totals: Totals | None) -> bytes:
    """totals: given if the client asked for running usage"""
    text = delta.text
    if not text and (totals is None or not delta.ids):
        return b""
    return b"%s%s}%s}\n\n" % (DELTA, to_json(text), running(totals))


def running(totals: Totals | None) -> bytes:
    """The end of a delta: the usage so far, if requested."""
    return b"" if totals is None else b',"usage":' + to_json(usage(totals))


def head(context: ResponseContext) -> dict[str, Any]:
    return {"id": f"{PREFIX}_{context.nonce}", "type": "message", "role": "assistant", "model": context.request.model}


def start(context: ResponseContext) -> bytes:
    """The message's head. Cached tokens are known, and reported, at the end."""
    nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    return named("message_start", message={**head(context), **nothing, "usage": usage(Totals(context.request))})


def end(context: ResponseContext, delta: Delta, totals: Totals, called: bool = False) -> bytes:
    """The end of a message, after all of its blocks are closed."""
    fields = {"delta": stop(delta, called), "usage": usage(totals), **extras(context, delta, totals)}
    return named("message_delta", **fields) + STOP


def answer(
    context: ResponseContext, blocks: list[dict[str, Any]], delta: Delta, totals: Totals, called: bool = False
) -> bytes:
    """A complete message; `delta` is its last one."""
    fields = {"content": blocks, **stop(delta, called), "usage": usage(totals), **extras(context, delta, totals)}
    return to_json(head(context) | fields)


def stop(delta: Delta, called: bool = False) -> dict[str, Any]:
    """The stop reason. A stop token id ends a turn like the model's own; only a text is a stop sequence."""
    sequence = delta.stop if isinstance(delta.stop, str) else None
    finish = Finish.EOS if delta.finish is Finish.STOP and sequence is None else delta.finish
    if called and finish is Finish.EOS:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": FINISH[finish or Finish.LENGTH], "stop_sequence": sequence}


def extras(context: ResponseContext, delta: Delta, totals: Totals) -> dict[str, Any]:
    return {"seed": delta.seed} | ({"timings": totals.timings} if context.request.timings else {})


def usage(totals: Totals) -> dict[str, int]:
    """Usage. Cached tokens are subtracted from the input tokens if the client marked something to cache."""
    used = totals.usage
    cached = used.cached_tokens if totals.request.format_data.get(CACHES) else 0
    return {
        "input_tokens": used.prompt_tokens - cached, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached, "output_tokens": used.completion_tokens,
    }  # fmt: skip
