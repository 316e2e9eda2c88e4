"""The parts of an Anthropic response around its content: first and last events, usage and errors."""

from dataclasses import dataclass

from frontend.api.anthropic import response_types as types
from frontend.api.receipts.receipt import receipt_of
from frontend.api.requests.encoding import to_json
from frontend.api.response_context import ResponseContext
from frontend.api.totals import Totals
from frontend.errors import ContextLengthExceeded, SluiceError, TooLarge
from frontend.request import Delta, Finish, GenerationRequest

PREFIX = "msg"
FINISH: dict[Finish, types.StopReason] = {
    Finish.EOS: "end_turn",
    Finish.STOP: "stop_sequence",
    Finish.LENGTH: "max_tokens",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """The settings of a request that affect how its response is written."""

    omits_thoughts: bool = False  # whether thinking blocks are written without their text
    caches: bool = False  # whether the request has a `cache_control`


NOTHING = Asked()


def asked(request: GenerationRequest) -> Asked:
    return request.format_data or NOTHING


def error(exc: SluiceError, request_id: str) -> bytes:
    message = _too_long(exc) if isinstance(exc, ContextLengthExceeded) else exc.message
    body = types.AnthropicErrorBody(type=_kind(exc), message=message)
    if exc.param == "thread":  # this error makes the SDK's helpers continue without a thread
        body.details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return to_json(types.AnthropicError(error=body, request_id=request_id))


def stream_error(exc: SluiceError, request_id: str, context: ResponseContext) -> bytes:
    """Encodes the event that ends a failed stream. No message_stop follows."""
    return b"event: error\ndata: " + error(exc, request_id) + b"\n\n"


def _too_long(exc: ContextLengthExceeded) -> str:
    """Returns Anthropic's error message, from which clients parse the numbers."""
    if exc.output:
        return (
            f"input length and `max_tokens` exceed context limit: {exc.prompt} + {exc.output} > {exc.limit}, "
            "decrease input length or `max_tokens` and try again"
        )
    about = "at least " if exc.at_least else ""
    return f"prompt is too long: {about}{exc.prompt} tokens > {exc.limit} maximum"


def _kind(exc: SluiceError) -> str:
    if isinstance(exc, TooLarge):
        return "request_too_large"
    if exc.code == "model_not_found":
        return "not_found_error"
    return "api_error" if exc.kind == "internal_error" else exc.kind


def event(event: types.MessageEvent) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (str(event.__struct_config__.tag).encode(), to_json(event))


BLOCK_START = event(types.ContentBlockStart(index=0, content_block=types.TextBlock(text="")))
PING = event(types.Ping())
BLOCK_STOP = event(types.ContentBlockStop(index=0))
STOP = event(types.MessageStop())
DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)


def text_delta(delta: Delta, totals: Totals | None) -> bytes:
    """Encodes a delta of the first block. totals: source of the running usage; None: no running usage"""
    text = delta.text
    if not text and (totals is None or not delta.ids):
        return b""
    return b"%s%s}%s}\n\n" % (DELTA, to_json(text), running_usage(totals))


def running_usage(totals: Totals | None) -> bytes:
    """Encodes running usage as the last field of a delta event; empty if none is requested (None)."""
    return b"" if totals is None else b',"usage":' + to_json(usage(totals))


def start(context: ResponseContext) -> bytes:
    """Encodes the first event. Its usage lacks the number of cached tokens, which is known only at the end."""
    message = types.Message(
        id=_id(context), model=context.request.model, content=[], stop_reason=None, stop_sequence=None,
        usage=usage(Totals(context.request)),
    )  # fmt: skip
    return event(types.MessageStart(message=message))


def end(context: ResponseContext, delta: Delta, totals: Totals, called: bool = False) -> bytes:
    """Encodes the last events, after all blocks are closed. called: whether the answer has tool calls"""
    reason = types.MessageDelta(
        delta=stop(delta, called),
        usage=usage(totals),
        seed=delta.seed,
        timings=totals.timings,
        receipt=receipt_of(context, delta),
    )
    return event(reason) + STOP


def complete_message(
    context: ResponseContext, blocks: list[types.ContentBlock], delta: Delta, totals: Totals, called: bool = False
) -> bytes:
    """Encodes a whole message. delta: the message's last delta"""
    reason = stop(delta, called)
    return to_json(
        types.Message(
            id=_id(context),
            model=context.request.model,
            content=blocks,
            stop_reason=reason.stop_reason,
            stop_sequence=reason.stop_sequence,
            usage=usage(totals),
            seed=delta.seed,
            timings=totals.timings,
            receipt=receipt_of(context, delta),
        )
    )


def _id(context: ResponseContext) -> str:
    return f"{PREFIX}_{context.nonce}"


def stop(delta: Delta, called: bool = False) -> types.MessageEnd:
    """Returns why the message ended. Only a stop string counts as a stop sequence; a stop token id ends the turn like
    the model's own end token."""
    sequence = delta.stop if isinstance(delta.stop, str) else None
    finish = Finish.EOS if delta.finish is Finish.STOP and sequence is None else delta.finish
    if called and finish is Finish.EOS:
        return types.MessageEnd(stop_reason="tool_use", stop_sequence=None)
    return types.MessageEnd(stop_reason=FINISH[finish or Finish.LENGTH], stop_sequence=sequence)


def usage(totals: Totals) -> types.MessageUsage:
    """Returns the usage. Cached tokens are counted separately only for requests with a `cache_control`."""
    used = totals.usage
    cached = used.cached_tokens if asked(totals.request).caches else 0
    return types.MessageUsage(
        input_tokens=used.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=used.completion_tokens,
    )
