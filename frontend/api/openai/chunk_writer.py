"""Writes the chunks of OpenAI's completions and plain chats. chat.py writes those with tools or reasoning.

The bytes around a text are the same in every chunk of a choice, so they are encoded once, and a token costs one
encoding of its text. Log-probabilities, token ids or running usage make each chunk longer (`_rich`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, cast

from msgspec import UNSET, UnsetType

from frontend.api.answer import ResponseContext, Totals
from frontend.api.openai import response_types as types
from frontend.api.openai.response_types import PromptLogprob, PromptLogprobs
from frontend.api.receipts import receipt_field
from frontend.errors import SluiceError, Unprocessable
from frontend.request import Delta, Finish, TokenLogprob, Usage
from frontend.schema.base import JsonArray, ResponseModel, in_slices, to_json
from frontend.schema.request_fields import OpenAIFields

if TYPE_CHECKING:
    from frontend.api.telemetry import TelemetryEvents

LEAST = -9999.0  # OpenAI's value for a log-probability of minus infinity, which JSON cannot express


def prompt_ids(context: ResponseContext, choice: int) -> list[int] | UnsetType:
    """Returns the ids of a choice's prompt if the request asks for token ids, else UNSET."""
    request = context.request
    return request.prompts[choice // request.n] if request.shown.ids else UNSET


def output_ids(context: ResponseContext, ids: list[int]) -> list[int] | UnsetType:
    """Returns `ids` if the request asks for token ids, else UNSET."""
    return ids if context.request.shown.ids else UNSET


async def prompt_logprobs(context: ResponseContext, last: Delta | None) -> PromptLogprobs | UnsetType:
    """Returns the log-probabilities of a choice's prompt, encoded in slices; UNSET if none are requested.

    last: the choice's last delta
    """
    scores = None if last is None else last.extras.prompt_logprobs
    if scores is None:
        return UNSET
    entries = JsonArray(each=16)
    entries.append(None)
    await in_slices(islice(scores, 1, None), lambda token: entries.append(_entry(context, token)))
    return cast(PromptLogprobs, entries.raw)


def _entry(context: ResponseContext, token: TokenLogprob) -> dict[int, PromptLogprob]:
    text = context.tokenizer.token_text
    ranked = [(token.token_id, token.logprob, token.rank)]
    ranked += [(id, logprob, rank) for rank, (id, logprob) in enumerate(token.top, 1) if id != token.token_id]
    return {
        id: PromptLogprob(logprob=max(LEAST, logprob), rank=rank, decoded_token=text(id))
        for id, logprob, rank in ranked
    }  # fmt: skip


def telemetry_events(context: ResponseContext, opening: int) -> "TelemetryEvents | None":
    """Returns an object that adds llama.cpp's fields to the events of a stream; None if none are requested."""
    asked = context.request.shown.telemetry
    if asked is None:
        return None
    from frontend.api.telemetry import TelemetryEvents

    return TelemetryEvents(asked, context.request.prompt_tokens, opening)


def as_fields(name: str, ids: list[int] | UnsetType) -> bytes:
    """Encodes ids as one more field of a JSON object that is written in pieces; empty for UNSET."""
    return b"" if ids is UNSET else b',"%s":%s' % (name.encode(), to_json(ids))


DONE = b"data: [DONE]\n\n"
FINISH: dict[Finish, types.FinishReason] = {Finish.EOS: "stop", Finish.STOP: "stop", Finish.LENGTH: "length"}


def error_body(exc: SluiceError) -> types.ErrorBody:
    return types.ErrorBody(message=exc.message, type=exc.kind, param=exc.param, code=exc.code)


def error(exc: SluiceError, request_id: str) -> bytes:
    return to_json(types.OpenAIError(error=error_body(exc)))


def stream_error(exc: SluiceError, request_id: str, context: ResponseContext) -> bytes:
    """Encodes the event that ends a failed stream. No `[DONE]` follows."""
    return b"data: " + error(exc, request_id) + b"\n\n"


def usage_of(usage: Usage) -> types.Usage:
    return types.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=types.PromptTokensDetails(
            cached_tokens=usage.cached_tokens, continued_tokens=usage.continued_tokens or UNSET
        ),
        completion_tokens_details=_details(usage),
    )


def _details(usage: Usage) -> types.CompletionTokensDetails | UnsetType:
    if usage.reasoning_tokens is None and usage.predicted is None:
        return UNSET
    accepted, rejected = usage.predicted or (UNSET, UNSET)
    return types.CompletionTokensDetails(
        reasoning_tokens=UNSET if usage.reasoning_tokens is None else usage.reasoning_tokens,
        accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """The differences between the chunks of completions and of chats."""

    head: Callable[[ResponseContext], ResponseModel]
    before: bytes  # encoded JSON before the text of a choice
    after: bytes
    without: bytes  # replaces `before`, the text and `after` in a chunk without text
    logprobs: Callable[[ResponseContext, Delta, int], ResponseModel]  # the int: the text's offset


class ChunkWriter:
    """Writes one response as a stream of chunks.

    opening: encoded JSON of the first chunk of each choice; empty: there is no such chunk
    """

    def __init__(self, context: ResponseContext, shape: Shape, opening: bytes = b"") -> None:
        request, shown = context.request, context.request.shown
        self._context = context
        self._shape = shape
        self._totals = Totals(request)
        self._left = len(request.prompts) * request.n
        self._head = b"data: " + to_json(shape.head(context))[:-1]
        self._bare = [self._head + b',"choices":[{"index":%d,' % i for i in range(self._left)]
        self._before = [bare + shape.before for bare in self._bare]
        self._usage_null = b',"usage":null' if shown.usage else b""
        self._rest = b',"logprobs":null,"finish_reason":null}]' + self._usage_null + b"}\n\n"
        self._after = shape.after + self._rest
        self._plain = not (shown.continuous_usage or request.sampling.logprobs is not None or shown.ids)
        self._offsets = [0] * self._left
        prompts = [as_fields("prompt_token_ids", prompt_ids(context, i)) for i in range(self._left)]
        self._opening = opening  # empty once it is written
        self._telemetry = telemetry_events(context, self._left if opening else 0)
        self._opening_ids = prompts[0]
        # Each choice's first chunk has the prompt's ids, unless the opening has them.
        self._prompt_ids = [b""] * self._left if opening else prompts

    def write(self, deltas: list[Delta]) -> bytes:
        opening = self._open() if self._opening and deltas else b""
        events = opening + b"".join([self._write(delta) for delta in deltas])
        return events if self._telemetry is None else self._telemetry.added(events, deltas)

    def _open(self) -> bytes:
        rest = b',"logprobs":null,"finish_reason":null}]%s%s}\n\n' % (self._usage(), self._opening_ids)
        opening, self._opening = b"".join([bare + self._opening + rest for bare in self._bare]), b""
        return opening

    def end(self) -> bytes:
        """Returns the end of the stream: the usage chunk, if requested, and the end mark."""
        end = self._usage_chunk() + DONE
        return end if self._telemetry is None else self._telemetry.added(end, ())

    def _write(self, delta: Delta) -> bytes:
        text = delta.text
        self._totals.add(delta)
        if not self._plain:
            chunk = self._rich(delta, text)
        elif text:
            chunk = self._before[delta.index] + to_json(text) + self._after
        else:
            chunk = b""
        return chunk if delta.finish is None else chunk + self._finish(delta)

    def _rich(self, delta: Delta, text: str) -> bytes:
        """Encodes a chunk with log-probabilities, token ids or running usage."""
        if not text and not delta.ids:
            return b""
        offset = self._offsets[delta.index]
        self._offsets[delta.index] += len(text)
        logprobs = None if delta.logprobs is None else self._shape.logprobs(self._context, delta, offset)
        ids = as_fields("token_ids", output_ids(self._context, delta.ids)) + self._prompt_ids[delta.index]
        self._prompt_ids[delta.index] = b""
        return b'%s%s%s,"logprobs":%s,"finish_reason":null%s}]%s}\n\n' % (
            self._before[delta.index], to_json(text), self._shape.after, to_json(logprobs), ids, self._usage(),
        )  # fmt: skip

    def _usage(self) -> bytes:
        running = self._context.request.shown.continuous_usage
        return b',"usage":' + to_json(usage_of(self._totals.usage)) if running else self._usage_null

    def _finish(self, delta: Delta) -> bytes:
        self._left -= 1
        request = self._context.request
        timings = request.shown.timings and not self._left and not request.shown.usage
        return b'%s%s,"logprobs":null,"finish_reason":%s%s}]%s%s}\n\n' % (
            self._bare[delta.index], self._shape.without,
            to_json(self._reason(delta)), _extras(self._context, delta), self._usage(),
            b',"timings":' + to_json(self._totals.timings) if timings else b"",
        )  # fmt: skip

    def _reason(self, delta: Delta) -> types.ChatFinishReason:
        return FINISH[delta.finish or Finish.LENGTH]

    def _usage_chunk(self) -> bytes:
        request = self._context.request
        if not request.shown.usage:
            return b""
        timings = b',"timings":' + to_json(self._totals.timings) if request.shown.timings else b""
        return b'%s,"choices":[],"usage":%s%s}\n\n' % (self._head, to_json(usage_of(self._totals.usage)), timings)


def _extras(context: ResponseContext, delta: Delta) -> bytes:
    """Encodes fields that OpenAI lacks: the stop string or id that ended the choice, its seed, and a receipt."""
    receipt = receipt_field(context, delta)
    return b',"stop_reason":%s,"matched_stop":%s,"seed":%s%s' % (
        to_json(delta.stop), to_json(delta.matched_stop), to_json(delta.seed), receipt,
    )  # fmt: skip


def check_stream_options(request: OpenAIFields, streams: bool) -> None:
    """Raises Unprocessable for stream options in a request that does not stream, as OpenAI does."""
    if request.stream_options is not None and not streams:
        raise Unprocessable("`stream_options` needs `stream: true`", param="stream_options", code="out_of_range")
