"""OpenAI's chat completions: https://platform.openai.com/docs/api-reference/chat

A stream has a chunk with each choice's role, text chunks, chunks with the finish reasons, a usage chunk if requested,
and `[DONE]`. Chunks are rendered as in `completions`; this module adds what differs in chats.
"""

from collections.abc import Iterable
from typing import Any, cast

from frontend.api.answer import Answer, AsyncDeltas, ResponseContext, Totals
from frontend.api.openai import response_types as types
from frontend.api.openai.chat_request import ChatRequest, chat_prompt, with_prediction
from frontend.api.openai.chat_tools import ParsedChunkWriter, finish_reason, message
from frontend.api.openai.chunk_writer import (
    FINISH,
    LEAST,
    ChunkWriter,
    Shape,
    check_stream_options,
    error_body,
    output_ids,
    prompt_ids,
    prompt_logprobs,
    usage_of,
)
from frontend.api.openai.completions import stream_error
from frontend.api.receipts import receipt_of
from frontend.api.request_builder import ParsedRequest, prepare
from frontend.chat.reasoning import budget_of
from frontend.chat.template_sandbox import with_template
from frontend.chat.tool_fields import openai_tool_choice
from frontend.errors import ContextLengthExceeded, SluiceError, Unprocessable, api_status
from frontend.model_context import ModelContext, before_truncation, check_model
from frontend.output_parser.parser import (
    ParsedOutput,
)
from frontend.request import Delta, GenerationRequest, TokenLogprob
from frontend.schema.base import JsonArray, in_slices, to_json
from frontend.server.sse import SERVER_SENT_EVENTS
from frontend.structured_output import fields

__all__ = [
    "FRAMING", "NAME", "PREFIX", "REQUEST", "complete", "error", "parse", "status", "stream_error", "stream_writer",
]  # fmt: skip
NAME, PREFIX = "chat", "chatcmpl"
FRAMING = SERVER_SENT_EVENTS
REQUEST = ChatRequest
status = api_status
ROLE = b'"delta":{"role":"assistant","content":null,"refusal":null}'


def _created(request: ChatRequest) -> int | None:
    """Returns when the answer to continue was created, if its receipt is given."""
    receipt = None if request.continue_from is None else request.continue_from.receipt
    return None if receipt is None else receipt.created


async def parse(request: ChatRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    _check_together(request)
    context = with_template(context, request.chat_template, _created(request))
    reading = ParsedRequest(
        request, "messages", _max_tokens(request), request.limit_name, ends_with_context=True, n=request.n,
        logprobs=_logprobs_asked(request),
        tool_choice=openai_tool_choice(request.tools, request.tool_choice, request.parallel_tool_calls, context),
        form=fields.openai(request, request.response_format, "response_format"),
        budget=budget_of(request, request.reasoning.max_tokens if request.reasoning else None),
    )  # fmt: skip
    prompt = await chat_prompt(request, reading.functions, before_truncation(request.truncate_prompt_tokens, context))
    reading = await with_prediction(reading, request.prediction, context)
    return await prepare(reading, [prompt.ids], context, prompt.begins, prompt.images)


def _check_together(request: ChatRequest) -> None:
    """Raises Unprocessable for a field that has no meaning without another field, as OpenAI does."""
    if request.tool_choice not in (None, "none", "auto", "required") and not request.tools:
        raise Unprocessable("`tool_choice` needs `tools`", param="tool_choice", code="out_of_range")
    check_stream_options(request, request.stream)


def _logprobs_asked(request: ChatRequest) -> int | None:
    if request.top_logprobs and not request.logprobs:
        raise Unprocessable("`top_logprobs` needs `logprobs`", param="top_logprobs", code="out_of_range")
    return (request.top_logprobs or 0) if request.logprobs else None


def _max_tokens(request: ChatRequest) -> int | None:
    """Returns the limit on new tokens; None: that of the model's name; UNLIMITED: the context's end."""
    given = request.limits
    if len(given) > 1:
        raise Unprocessable(
            "`max_tokens` and `max_completion_tokens` differ", param="max_completion_tokens", code="out_of_range"
        )
    return given.pop() if given else None


def stream_writer(context: ResponseContext) -> ChunkWriter:
    parser_config = context.request.parser_config
    if parser_config is None:
        return ChunkWriter(context, SHAPE, ROLE)
    return ParsedChunkWriter(context, SHAPE, ROLE, parser_config)


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """Returns the response of a request that does not stream."""
    choices = [_Choice(context, index) for index in range(context.request.n)]
    totals = Totals(context.request)
    async for deltas in arriving:
        for delta in deltas:
            totals.add(delta)
            await choices[delta.index].add_scored(delta)
    finished = [choice.finished(totals) for choice in choices]
    return to_json(
        types.ChatCompletion(
            id=context.id,
            created=context.created,
            model=context.request.model,
            system_fingerprint=context.system_fingerprint,
            choices=finished,
            usage=usage_of(totals.usage),
            timings=totals.timings,
            prompt_token_ids=prompt_ids(context, 0),
            prompt_logprobs=await prompt_logprobs(context, choices[0].end),
        )
    )


def _chunk_head(context: ResponseContext) -> types.ChatChunkHead:
    return types.ChatChunkHead(
        id=context.id,
        created=context.created,
        model=context.request.model,
        system_fingerprint=context.system_fingerprint,
    )


class _Choice(Answer):
    """A choice of a response that is not streamed."""

    def __init__(self, context: ResponseContext, index: int) -> None:
        super().__init__(context, index)
        self._scores = JsonArray(each=16)
        self._before: list[str] = []

    async def add_scored(self, delta: Delta) -> None:
        """Adds a delta. Its log-probabilities are encoded at once, which takes a tenth of their memory."""
        self.add(delta)
        self._before += delta.extras.before
        if delta.logprobs:
            context, scores = self.context, self._scores
            await in_slices(delta.logprobs, lambda token: scores.extend(logprob_entries(context, [token])))

    def finished(self, totals: Totals) -> types.ChatChoice:
        """Returns the finished choice, and adds its reasoning tokens to the totals."""
        end, scored = self.end, self.context.request.sampling.logprobs is not None
        answer, reason = self._answer(end, totals)
        return types.ChatChoice(
            index=self.index,
            message=answer,
            logprobs=types.ChatLogprobs(content=cast(Any, self._scores.raw)) if scored else None,
            finish_reason=reason,
            stop_reason=end.stop,
            matched_stop=end.matched_stop,
            seed=end.seed,
            receipt=receipt_of(self.context, end),
            token_ids=output_ids(self.context, self.ids),
        )

    def _answer(self, end: Delta, totals: Totals) -> tuple[types.ChatAnswer, types.ChatFinishReason]:
        parser_config = self.context.request.parser_config
        if parser_config is None:
            return types.ChatAnswer(content=self.text), FINISH[self.finish]
        parsed = ParsedOutput.parse(self.texts, parser_config, len(self.ids), self._before)
        totals.reasoning_tokens = (totals.reasoning_tokens or 0) + parsed.reasoning_tokens
        return message(parsed, self.context, self.index), finish_reason(parsed.parser, end)


def _logprobs(context: ResponseContext, delta: Delta, offset: int = 0) -> types.ChatLogprobs:
    return types.ChatLogprobs(content=logprob_entries(context, delta.logprobs or ()))


def logprob_entries(
    context: ResponseContext, scores: Iterable[TokenLogprob], no_bytes: list[int] | None = None
) -> list[types.TokenLogprobs]:
    """Returns an entry for each token. no_bytes: the `bytes` of a token that adds no text"""
    text, raw = context.token_text, context.tokenizer.token_bytes

    def score(id: int, logprob: float) -> types.TokenScore:
        return types.TokenScore(token=text(id), logprob=max(LEAST, logprob), bytes=list(raw(id)) or no_bytes)

    return [
        types.TokenLogprobs(
            token=text(token.token_id),
            logprob=max(LEAST, token.logprob),
            bytes=list(raw(token.token_id)) or no_bytes,
            top_logprobs=[score(*rival) for rival in (token.top_with_token if token.top else ())],
        )
        for token in scores
    ]


SHAPE = Shape(_chunk_head, before=b'"delta":{"content":', after=b"}", without=b'"delta":{}', logprobs=_logprobs)


def error(exc: SluiceError, request_id: str) -> bytes:
    """Encodes an error. For a prompt that is too long, adds its length and the context's, for llama.cpp's clients."""
    body = error_body(exc)
    if isinstance(exc, ContextLengthExceeded):
        body.n_prompt_tokens, body.n_ctx = exc.prompt, exc.limit
    return to_json(types.OpenAIError(error=body))
