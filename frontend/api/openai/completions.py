"""OpenAI's text completions: https://platform.openai.com/docs/api-reference/completions

A stream has text chunks, a chunk with the finish reason of each choice, a usage chunk if requested, and `[DONE]`. All
waiting chunks go out in one write, and the constant parts of a chunk are encoded once. Chat completions use the same
chunks in a slightly different shape.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, UnsetType

from frontend.api.chat import structured_output_fields
from frontend.api.model_context import ModelContext, check_model
from frontend.api.openai import response_types as types
from frontend.api.openai.completions_input import CompletionRequest, check_stream_options, prompt_texts, tokenized
from frontend.api.openai.token_details import as_fields, output_ids, prompt_ids, prompt_logprobs, telemetry_events
from frontend.api.prepare import Reading, prepare
from frontend.api.receipts.receipt import receipt_field, receipt_of
from frontend.api.requests.encoding import JsonArray, in_slices, to_json
from frontend.api.requests.response_types import ResponseModel
from frontend.api.response_context import AsyncDeltas, ResponseContext
from frontend.api.totals import Totals
from frontend.api.truncation import before_truncation
from frontend.errors import SluiceError, Unprocessable, own_status
from frontend.features import NO_FEATURES, Features
from frontend.request import Delta, Finish, GenerationRequest, TokenLogprob, Usage
from frontend.server.sse import SERVER_SENT_EVENTS
from frontend.text.fill_in_middle import with_suffix

NAME, PREFIX = "completions", "cmpl"
FRAMING = SERVER_SENT_EVENTS
REQUEST = CompletionRequest
status = own_status
DONE = b"data: [DONE]\n\n"
FINISH: dict[Finish, types.FinishReason] = {Finish.EOS: "stop", Finish.STOP: "stop", Finish.LENGTH: "length"}


async def parse(request: CompletionRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    if request.best_of not in (None, request.n):
        raise Unprocessable("`best_of` other than `n` is not supported", param="best_of", code="unsupported_field")
    if request.max_tokens == 0 and not request.echo:
        raise Unprocessable("`max_tokens` must be at least 1 without `echo`", param="max_tokens", code="out_of_range")
    streams = request.stream or (request.stream_format or context.stream_format) == "events"
    check_stream_options(request, streams)
    _check_suffix(request)
    reading = Reading(
        request, "prompt", request.max_tokens, n=request.n, logprobs=request.rivals,
        form=structured_output_fields.openai(request, request.response_format, "response_format"),
        features=Features(echo=prompt_texts(request.prompts)) if request.echo else NO_FEATURES,
    )  # fmt: skip
    before = before_truncation(request.truncate_prompt_tokens, context)
    prompts = await tokenized(request.prompts, before, request.add_special_tokens, may_be_empty=bool(request.suffix))
    if request.suffix:
        prompts = await with_suffix(prompts, request.suffix, context.tokenizer)
    return await prepare(reading, prompts, context)


def _check_suffix(request: CompletionRequest) -> None:
    if request.suffix and request.echo:
        raise Unprocessable("`suffix` cannot go with `echo`", param="suffix", code="conflicting_fields")


def stream_writer(context: ResponseContext) -> "ChunkWriter":
    return ChunkWriter(context, SHAPE)


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """Returns the response of a request that does not stream."""
    choices = [_Choice(context, index) for index in range(len(context.request.prompts) * context.request.n)]
    totals = Totals(context.request)
    async for deltas in arriving:
        for delta in deltas:
            totals.add(delta)
            await choices[delta.index].add(delta)
    finished = [await choice.finished() for choice in choices]
    return to_json(
        types.Completion(
            id=context.id,
            created=context.created,
            model=context.request.model,
            system_fingerprint=context.system_fingerprint,
            choices=finished,
            usage=usage_of(totals.usage),
            timings=totals.timings,
        )
    )


def error(exc: SluiceError, request_id: str) -> bytes:
    return to_json(types.OpenAIError(error=error_body(exc)))


def error_body(exc: SluiceError) -> types.ErrorBody:
    return types.ErrorBody(message=exc.message, type=exc.kind, param=exc.param, code=exc.code)


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


def stream_error(exc: SluiceError, request_id: str, context: ResponseContext) -> bytes:
    """Encodes the event that ends a failed stream. No `[DONE]` follows."""
    return b"data: " + error(exc, request_id) + b"\n\n"


def _head(context: ResponseContext) -> types.CompletionHead:
    return types.CompletionHead(
        id=context.id,
        created=context.created,
        model=context.request.model,
        system_fingerprint=context.system_fingerprint,
    )


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


class _Choice:
    """Collects the deltas of one choice for a response that is not streamed."""

    def __init__(self, context: ResponseContext, index: int) -> None:
        self._context = context
        self._index = index
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._length = 0
        self._logprobs: _Columns | None = None
        self._end: Delta | None = None

    async def add(self, delta: Delta) -> None:
        text = delta.text
        if delta.logprobs is not None:
            columns = self._logprobs = self._logprobs or _Columns(self._context)
            columns.offset = self._length
            await in_slices(zip(delta.logprobs, delta.texts, strict=False), columns.add)
        self._texts.append(text)
        self._ids += delta.ids
        self._length += len(text)
        self._end = delta

    async def finished(self) -> types.CompletionChoice:
        end = self._end
        if end is None or end.finish is None:
            raise SluiceError(f"choice {self._index} has no end")
        return types.CompletionChoice(
            index=self._index,
            text="".join(self._texts),
            logprobs=None if self._logprobs is None else self._logprobs.all,
            finish_reason=FINISH[end.finish],
            stop_reason=end.stop,
            matched_stop=end.matched_stop,
            seed=end.seed,
            receipt=receipt_of(self._context, end),
            token_ids=output_ids(self._context, self._ids),
            prompt_token_ids=prompt_ids(self._context, self._index),
            prompt_logprobs=await prompt_logprobs(self._context, end),
        )


class _Columns:
    """Encodes log-probabilities in columns. offset: where the next text begins in the choice's text, in characters"""

    def __init__(self, context: ResponseContext) -> None:
        self.offset = 0
        self._context = context
        self._tokens, self._logprobs, self._tops, self._offsets = (JsonArray(each=64) for _ in range(4))

    def add(self, scored: tuple[TokenLogprob, str]) -> None:
        """Adds a token and the text that it added to the choice's."""
        token, text = scored
        known = token.logprob == token.logprob  # a prompt's first token has NaN
        self._tokens.append(self._context.token_text(token.token_id))
        self._logprobs.append(token.logprob if known else None)
        self._tops.append(_top(self._context, token) if known else None)
        self._offsets.append(self.offset)
        self.offset += len(text)

    @property
    def all(self) -> types.CompletionLogprobs:
        columns: Any = (self._tokens.raw, self._logprobs.raw, self._tops.raw, self._offsets.raw)
        tokens, logprobs, tops, offsets = columns
        return types.CompletionLogprobs(tokens=tokens, token_logprobs=logprobs, top_logprobs=tops, text_offset=offsets)


def _logprobs(context: ResponseContext, delta: Delta, offset: int) -> types.CompletionLogprobs:
    """Returns a delta's log-probabilities. offset: where its text begins in the choice's text, in characters"""
    columns = _Columns(context)
    columns.offset = offset
    for scored in zip(delta.logprobs or (), delta.texts, strict=False):
        columns.add(scored)
    return columns.all


def _top(context: ResponseContext, token: TokenLogprob) -> dict[str, float | None]:
    """Returns the likeliest tokens and the drawn token by text. If two have the same text, the likelier stays."""
    text = context.token_text
    return {text(id): logprob for id, logprob in reversed(token.top_with_token)}


SHAPE = Shape(_head, before=b'"text":', after=b"", without=b'"text":""', logprobs=_logprobs)
