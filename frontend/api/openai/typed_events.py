"""The typed events of /v1/completions with `"stream_format": "events"`.

The response is always a stream: one `token` event for each generated id, in order, then exactly one `done` or `error`.
"""

from dataclasses import replace
from itertools import zip_longest

from frontend.api.answer import AsyncDeltas, ResponseContext, Totals
from frontend.api.openai import completions
from frontend.api.openai.completions import CompletionRequest
from frontend.api.receipts import receipt_field
from frontend.errors import SluiceError, Unprocessable, own_status
from frontend.model_context import ModelContext
from frontend.request import Delta, GenerationRequest
from frontend.schema.base import to_json
from frontend.server.sse import SERVER_SENT_EVENTS

NAME, PREFIX = "events", completions.PREFIX
FRAMING = SERVER_SENT_EVENTS
REQUEST = CompletionRequest
status = own_status


async def parse(body: CompletionRequest, context: ModelContext) -> GenerationRequest:
    """Does the same as completions.parse, but refuses the features that typed events cannot express."""
    request = await completions.parse(body, context)
    if request.n > 1 or len(request.prompts) > 1:
        param = "n" if request.n > 1 else "prompt"
        raise Unprocessable(f"`{param}`: typed events carry one completion", param=param, code="unsupported_field")
    if request.features.echo:
        raise Unprocessable("`echo`: typed events carry generated tokens only", param="echo", code="unsupported_field")
    if request.sampling.logprobs is not None:
        raise Unprocessable("`logprobs`: typed events have none", param="logprobs", code="unsupported_field")
    for name in ("prompt_logprobs", "return_token_ids", "timings_per_token", "return_progress"):
        if getattr(body, name) not in (None, False):
            raise Unprocessable(f"`{name}`: typed events have none", param=name, code="unsupported_field")
    return replace(request, stream=True)


def stream_writer(context: ResponseContext) -> "EventWriter":
    return EventWriter(context)


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """Returns all events at once. ApiFormat requires this function; no request calls it: typed events always stream."""
    writer = EventWriter(context)
    return b"".join([writer.write(deltas) async for deltas in arriving])


def error(exc: SluiceError, request_id: str) -> bytes:
    return to_json({"error": exc.message})


def stream_error(exc: SluiceError, request_id: str, context: ResponseContext) -> bytes:
    return b'event: error\ndata: {"error": %s}\n\n' % to_json(exc.message)


class EventWriter:
    """Writes one response as typed events."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._totals = Totals(context.request)

    def write(self, deltas: list[Delta]) -> bytes:
        data = b""
        for delta in deltas:
            self._totals.add(delta)
            data += _tokens(delta) + (_done(self._context, delta, self._totals) if delta.finish else b"")
        return data

    def end(self) -> bytes:
        return b""


def _tokens(delta: Delta) -> bytes:
    """Encodes an event for each id. Text that was held back until after the last id becomes an event without an id."""
    return b"".join(
        b'event: token\ndata: {"token": %s, "token_id": %s}\n\n'
        % (to_json(text), b"null" if id is None else b"%d" % id)
        for id, text in zip_longest(delta.ids, delta.texts)
    )


def _done(context: ResponseContext, delta: Delta, totals: Totals) -> bytes:
    usage = totals.usage
    return b'event: done\ndata: {"finish_reason": "%s", "usage": %s%s%s}\n\n' % (
        str(delta.finish).encode(),
        b'{"prompt_tokens": %d, "completion_tokens": %d, "total_tokens": %d}'
        % (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens),
        b', "timings": ' + to_json(totals.timings) if context.request.shown.timings else b"",
        receipt_field(context, delta),
    )
