"""OpenAI's text completions: https://platform.openai.com/docs/api-reference/completions

A stream has text chunks, a chunk with the finish reason of each choice, a usage chunk if requested, and `[DONE]`. All
waiting chunks go out in one write, and the constant parts of a chunk are encoded once. Chat completions use the same
chunks in a slightly different shape.
"""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from frontend.api.answer import Answer, AsyncDeltas, ResponseContext, Totals
from frontend.api.openai import response_types as types
from frontend.api.openai.chunk_writer import (
    FINISH,
    ChunkWriter,
    Shape,
    check_stream_options,
    error,
    output_ids,
    prompt_ids,
    prompt_logprobs,
    stream_error,
    usage_of,
)
from frontend.api.receipts import ContinueFromField, receipt_of
from frontend.api.request_builder import ParsedRequest, prepare
from frontend.errors import BadRequest, Unprocessable, own_status
from frontend.model_context import ModelContext, before_truncation, check_characters, check_ids, check_model
from frontend.request import NO_FEATURES, Delta, Features, GenerationRequest, TokenLogprob
from frontend.schema.base import EXACT, MOST, FieldError, JsonArray, in_slices, to_json
from frontend.schema.request_fields import (
    UNLIMITED,
    ChoiceCount,
    LogprobCount,
    Positive,
    PositiveShare,
    Text,
    TokenDetailFields,
    doc,
)
from frontend.server.sse import SERVER_SENT_EVENTS
from frontend.structured_output import fields
from frontend.structured_output.fields import ResponseFormatField
from frontend.text.fill_in_middle import with_suffix

# The request of OpenAI's text completions, and its prompts as token ids. Typed events use the same request.

MAX_PROMPTS = 2048
SHAPES = "a string, an array of token ids, or an array of either"
Prompt = str | list[int]


def prompts_schema(most: int) -> dict[str, Any]:
    """Returns the JSON Schema of one prompt, or of an array of up to `most` prompts."""
    return {"anyOf": [*_one, {"type": "array", "items": {"anyOf": _one}, "minItems": 1, "maxItems": most}]}


_ids: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_one: list[dict[str, Any]] = [{"type": "string", "minLength": 1}, _ids]
_Token = Annotated[int, EXACT]
_Off = Annotated[bool, Meta(extra_json_schema={"enum": [False]})]


MOST_TOKENS = 128  # limit on an answer's tokens if neither the request nor the name of its model has one


class CompletionRequest(TokenDetailFields):
    ONLY: ClassVar = {
        **TokenDetailFields.ONLY,
        **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning"), (True,)),
        "thinking_token_budget": (-1,),
    }  # fmt: skip

    model: Annotated[Text | None, doc("A served name, see `/v1/models`; absent: the served model")] = None
    prompt: Annotated[
        str | list[str | _Token | list[_Token]],
        Meta(description="A text, token ids, or several of either", extra_json_schema=prompts_schema(MAX_PROMPTS)),
    ]
    max_tokens: Annotated[
        Annotated[int, Meta(ge=-2, le=MOST)] | None,
        doc(f"Most tokens of the answer; -1 and -2: to the context's end; absent: {MOST_TOKENS}"),
    ] = None
    # vLLM's range; other routes take 0, too
    top_p: Annotated[
        PositiveShare | None, doc("Draw from the likeliest tokens that together have this probability")
    ] = None
    n: ChoiceCount = 1
    add_special_tokens: Annotated[bool, doc("false: without the tokenizer's special tokens, such as BOS")] = True
    best_of: Annotated[Positive | None, doc("Must equal `n`")] = None
    logprobs: Annotated[
        _Off | LogprobCount | None,
        doc("Log-probabilities of the answer's tokens, and of this many likeliest tokens (-1: all); false: none"),
    ] = None
    suffix: Annotated[
        str | None,
        doc("The text after the answer, for a model that was trained to fill in the middle; the prompt may be empty"),
    ] = None
    echo: Annotated[bool, doc("Return the prompt before the answer; `logprobs` then scores it, too")] = False
    continue_from: ContinueFromField = None
    response_format: ResponseFormatField = None
    stream_format: Annotated[
        Literal["openai", "events"] | None,
        doc("`events`: typed events instead of OpenAI's chunks; null: `--completions-stream-format`"),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        prompts = self.prompts
        if not prompts or not (all(prompts) or self.suffix):
            raise FieldError("prompt", "is empty", BadRequest, "empty_prompt")
        if len(prompts) > MAX_PROMPTS:
            raise FieldError("prompt", f"may have at most {MAX_PROMPTS} entries")
        if self.logprobs is True:
            raise FieldError("logprobs", "must be an integer or false: it says how many", BadRequest, "wrong_type")
        kinds = {*map(type, self.prompt)} if isinstance(self.prompt, list) else set()
        if int in kinds and kinds != {int}:
            raise FieldError("prompt", f"must be {SHAPES}", BadRequest, "wrong_type")

    def limit(self, context: ModelContext) -> int | None:
        """Returns the limit on new tokens; None: that of the model's name; UNLIMITED: the context's end."""
        if self.max_tokens is None:
            return MOST_TOKENS if context.most_new is None else None
        return max(UNLIMITED, self.max_tokens)

    @property
    def asked_logprobs(self) -> int | None:
        """How many likeliest tokens are reported for each position of the answer; None: no log-probabilities."""
        return None if self.logprobs is False else self.logprobs

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts as a list, even if the body has a single one."""
        several: Any = self.prompt
        single = type(several) is str or (bool(several) and type(several[0]) is int)
        return [several] if single else several


def prompt_texts(prompts: list[Prompt]) -> tuple[str, ...]:
    """Returns each prompt as the client wrote it; "" for a prompt of token ids."""
    return tuple([prompt if isinstance(prompt, str) else "" for prompt in prompts])


async def tokenized(
    prompts: list[Prompt],
    context: ModelContext,
    add_special_tokens: bool,
    param: str = "prompt",
    may_be_empty: bool = False,
) -> list[list[int]]:
    """Encodes the prompts.

    param: the request field that holds the prompts
    may_be_empty: whether prompts may have no tokens, because a suffix follows

    Raises BadRequest for an empty prompt, Unprocessable for ids outside the vocabulary.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        check_characters(param, text, context)
    encoded = iter(await context.tokenizer.encode_batch(texts, add_special_tokens) if texts else [])
    tokens = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
    for ids in tokens:
        if not (ids or may_be_empty):
            raise BadRequest(f"`{param}` has no tokens", param=param, code="empty_prompt")
        check_ids(param, ids, context.vocab_size)
    return tokens


__all__ = [
    "FRAMING", "NAME", "PREFIX", "REQUEST", "complete", "error", "parse", "status", "stream_error", "stream_writer",
]  # fmt: skip
NAME, PREFIX = "completions", "cmpl"
FRAMING = SERVER_SENT_EVENTS
REQUEST = CompletionRequest
status = own_status


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
    reading = ParsedRequest(
        request, "prompt", request.limit(context), n=request.n, logprobs=request.asked_logprobs,
        form=fields.openai(request, request.response_format, "response_format"),
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
            await choices[delta.index].add_scored(delta)
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


def _head(context: ResponseContext) -> types.CompletionHead:
    return types.CompletionHead(
        id=context.id,
        created=context.created,
        model=context.request.model,
        system_fingerprint=context.system_fingerprint,
    )


class _Choice(Answer):
    """A choice of a response that is not streamed."""

    def __init__(self, context: ResponseContext, index: int) -> None:
        super().__init__(context, index)
        self._length = 0
        self._logprobs: _Columns | None = None

    async def add_scored(self, delta: Delta) -> None:
        """Adds a delta. Keeps its log-probabilities as JSON, which takes a tenth of their memory."""
        if delta.logprobs is not None:
            columns = self._logprobs = self._logprobs or _Columns(self.context)
            columns.offset = self._length
            await in_slices(zip(delta.logprobs, delta.texts, strict=False), columns.add)
        self.add(delta)
        self._length += len(delta.text)

    async def finished(self) -> types.CompletionChoice:
        end = self.end
        return types.CompletionChoice(
            index=self.index,
            text=self.text,
            logprobs=None if self._logprobs is None else self._logprobs.all,
            finish_reason=FINISH[self.finish],
            stop_reason=end.stop,
            matched_stop=end.matched_stop,
            seed=end.seed,
            receipt=receipt_of(self.context, end),
            token_ids=output_ids(self.context, self.ids),
            prompt_token_ids=prompt_ids(self.context, self.index),
            prompt_logprobs=await prompt_logprobs(self.context, end),
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
