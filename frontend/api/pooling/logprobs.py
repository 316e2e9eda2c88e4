"""/v1/logprobs: the log-probabilities of given texts, as arrays.

A prompt is scored from its second token on. If there are answers, only these are scored, and a prompt that they share
is computed once. Prompt and answer are tokenized separately, so no token spans the boundary between them.
"""

import math
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Raw

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.openai import chunk_writer, completions
from frontend.api.openai.chat_request import Messages, Template, TokenizeRequest, chat_prompt
from frontend.api.openai.chunk_writer import LEAST
from frontend.api.openai.completions import prompts_schema
from frontend.api.pooling import fields as types
from frontend.api.pooling.fields import MAX_INPUTS, PoolingFields, admission, check_prompts
from frontend.chat.template_sandbox import with_template
from frontend.chat.tool_fields import FunctionTools, offered
from frontend.errors import BadRequest, Internal, Unprocessable, api_status
from frontend.model_context import ModelContext, check_characters, check_model
from frontend.request import Features, GenerationRequest, ResponseOptions, Scored, Usage
from frontend.schema.base import EXACT, FieldError, JsonArray, made, to_json
from frontend.schema.request_fields import TemplateArguments, doc
from shared.messages import Logprobs, Sampling
from shared.wire import pack_f32, pack_u32, unpack_f32, unpack_u32

# The arrays of /v1/logprobs: packed log-probabilities from a worker, and their encodings for clients.

T = TypeVar("T", int, float)
COUNTS = "X-Sluice-Token-Counts"
NO_LOGPROB, NO_ID = pack_f32([math.nan]), pack_u32([0])


@dataclass(frozen=True, slots=True)
class Arrays:
    """The packed log-probabilities of one row: N scored tokens of one prompt.

    If the row includes the first token of the prompt, which has no log-probability, `first` is 1. NaN then stands for
    the log-probability of this token, and NaN with the id 0 for each of the likeliest tokens at its position.
    """

    ids: list[int] | None  # ids of the tokens; None: not requested
    first: int
    count: int  # N
    top: int  # K, how many likeliest tokens are reported per token
    chosen: bytes  # [N] float32
    top_ids: bytes  # [N, K] uint32
    top_logprobs: bytes  # [N, K] float32

    @classmethod
    def of(cls, request: GenerationRequest, index: int, scores: Sequence[Logprobs]) -> Self:
        """Makes the arrays of a prompt. Raises Internal if the worker sent too few log-probabilities."""
        scored = request.features.scored
        assert scored is not None, "only requests for log-probabilities have arrays"
        prompt, start, top = request.prompts[index], scored.starts[index], request.sampling.prompt_top
        first, count = int(start == 0), len(prompt) - start
        chosen = first * NO_LOGPROB + b"".join([one.chosen for one in scores])
        if len(chosen) != 4 * count:
            raise Internal("the worker sent too few log-probabilities", code="worker_error")
        return cls(
            prompt[start:] if request.shown.ids else None, first, count, top, chosen,
            first * top * NO_ID + b"".join([one.top_ids for one in scores]),
            first * top * NO_LOGPROB + b"".join([one.top_logprobs for one in scores]),
        )  # fmt: skip


def as_lists(index: int, row: Arrays) -> types.ScoredTokens:
    """Returns the row as JSON arrays, with null for a token that has no log-probability."""
    top_ids: Any = UNSET
    top: Any = UNSET
    if row.top:
        top_ids = _encoded(row.first, _in_rows(unpack_u32(row.top_ids), row.top))
        top = _encoded(row.first, map(_finite, _in_rows(unpack_f32(row.top_logprobs), row.top)))
    chosen: Any = _encoded(row.first, _numbers(row.chosen))
    return types.ScoredTokens(
        index=index, token_ids=UNSET if row.ids is None else row.ids,
        token_logprobs=chosen, top_token_ids=top_ids, top_logprobs=top,
    )  # fmt: skip


def _encoded(unknown: int, entries: Iterable[Any]) -> Raw:
    """Returns entries in JSON, with null for the first `unknown` of them. Encodes some hundreds at a time."""
    encoded = JsonArray()
    encoded.extend([None] * unknown)
    encoded.extend(islice(entries, unknown, None))
    return encoded.raw


def _in_rows(numbers: "array[T]", width: int) -> Iterator[list[T]]:
    return (numbers[at : at + width].tolist() for at in range(0, len(numbers), width))


def _numbers(packed: bytes) -> list[float]:
    """Returns the log-probabilities, with LEAST for minus infinity, which JSON cannot express."""
    return _finite(unpack_f32(packed).tolist())


def _finite(values: list[float]) -> list[float]:
    return [max(LEAST, value) for value in values] if -math.inf in values else values


def as_base64(index: int, row: Arrays) -> types.ScoredTokens:
    """Returns the row with each array as base64."""
    return types.ScoredTokens(
        index=index, token_ids=UNSET if row.ids is None else _text(pack_u32(row.ids)),
        token_logprobs=_text(row.chosen), top_token_ids=_text(row.top_ids) if row.top else UNSET,
        top_logprobs=_text(row.top_logprobs) if row.top else UNSET,
    )  # fmt: skip


def _text(packed: bytes) -> str:
    return b64encode(packed).decode()


def as_bytes(rows: Sequence[Arrays]) -> types.Binary:
    """Returns the arrays one after another, each with the entries of all rows, and the rows' lengths in a header."""
    arrays = [
        *[pack_u32(row.ids) for row in rows if row.ids is not None], *[row.chosen for row in rows],
        *[row.top_ids for row in rows], *[row.top_logprobs for row in rows],
    ]  # fmt: skip
    return types.Binary(b"".join(arrays), {COUNTS: ",".join([str(row.count) for row in rows])})


NAME, PREFIX, TASKS = "logprobs", "lp", ("generate",)
MOST_RIVALS = 1000
# Limit on the numbers in a response: 16 MiB of float32. Writing them pauses this process for some tenths of a second.
MOST_NUMBERS = 1 << 22
MOST_BINARY_ROWS = 512  # the rows' lengths are in a header, for which proxies allow 4 KiB
SHAPES = "a string, an array of token ids, or an array of either"
Input = str | list[int]
_Token = Annotated[int, EXACT]
_Inputs = str | list[str | _Token | list[_Token]] | None
_schema = prompts_schema(MAX_INPUTS)


class LogprobsRequest(PoolingFields):
    prompt: Annotated[
        _Inputs, Meta(description="A text, token ids, or several of either", extra_json_schema=_schema)
    ] = None
    messages: Annotated[Messages | None, doc("A conversation in place of `prompt`")] = None
    answer: Annotated[
        _Inputs,
        Meta(
            description="What follows the prompt, and is scored alone: one for each prompt, or several for one prompt",
            extra_json_schema=_schema,
        ),
    ] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MOST_RIVALS)], doc("Add ids and log-probabilities of so many of the likeliest")
    ] = 0
    return_token_ids: Annotated[bool, doc("Add the ids of the tokens that are scored")] = False
    encoding_format: Annotated[
        Literal["float", "base64", "bytes"],
        doc("`base64`: each array is little-endian float32 (ids: uint32); `bytes`: the arrays alone, without JSON"),
    ] = "float"
    add_special_tokens: Annotated[bool, doc("Whether the tokenizer adds its own tokens to a prompt's text")] = True
    chat_template: Template = None
    chat_template_kwargs: TemplateArguments = None
    tools: FunctionTools = None

    def __post_init__(self) -> None:
        for name in ("prompt", "answer"):
            _check_shape(name, getattr(self, name))


def _check_shape(name: str, value: Any) -> None:
    if value is None:
        return
    if not value or not all(inputs := _as_list(value)):
        raise FieldError(name, "is empty", BadRequest, "empty_prompt")
    if len(inputs) > MAX_INPUTS:
        raise FieldError(name, f"may have at most {MAX_INPUTS} entries")
    if int in {*map(type, inputs)}:
        raise FieldError(name, f"must be {SHAPES}", BadRequest, "wrong_type")


def _as_list(value: Any) -> list[Input]:
    """Returns the inputs as a list, even if there is a single one."""
    single = isinstance(value, str) or {*map(type, value)} == {int}
    return [value] if single else value


REQUEST = LogprobsRequest
WRITERS = {"float": as_lists, "base64": as_base64}
status = api_status
error = completions.error


async def parse(request: LogprobsRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for log-probabilities. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("give either `prompt` or `messages`", param="prompt")
    heads, tails = await _heads(request, context), await _tails(request, context)
    if tails and len(heads) not in (1, len(tails)):
        raise BadRequest(
            f"`prompt` has {len(heads)} entries and `answer` has {len(tails)}: the first may have one, or as many",
            param="prompt",
        )
    pairs = [*zip(cycle(heads), tails, strict=False)] if tails else [(head, []) for head in heads]
    rows = [head + tail for head, tail in pairs]
    starts = [len(head) if tail else 0 for head, tail in pairs]
    check_prompts("messages" if request.messages else "prompt", rows, context)
    _check_size(request, rows, starts)
    return GenerationRequest(
        tuple(rows), Sampling(0, prompt_logprobs=True, prompt_top=min(request.top_logprobs, context.vocab_size)),
        model=context.model, shown=ResponseOptions(ids=request.return_token_ids), admission=admission(request),
        features=Features(
            scored=Scored(tuple(starts)), one_group=len(heads) == 1 < len(rows), adapter=context.adapter
        ),
        format_data=request.encoding_format,
    )  # fmt: skip


async def _heads(request: LogprobsRequest, context: ModelContext) -> list[list[int]]:
    if request.messages is None:
        inputs = _as_list(request.prompt)
        encoded = iter(
            await context.tokenizer.encode_batch(_texts("prompt", inputs, context), request.add_special_tokens)
        )
        heads = [next(encoded) if isinstance(one, str) else one for one in inputs]
    else:
        chat = TokenizeRequest(
            messages=request.messages, tools=request.tools, chat_template_kwargs=request.chat_template_kwargs
        )
        context = with_template(context, request.chat_template)
        heads = [(await chat_prompt(chat, offered(request.tools), context)).ids]
    check_prompts("prompt", heads, context)
    return heads


async def _tails(request: LogprobsRequest, context: ModelContext) -> list[list[int]]:
    inputs = [] if request.answer is None else _as_list(request.answer)
    encoded = iter(await context.tokenizer.encode_following(_texts("answer", inputs, context)))
    tails = [next(encoded) if isinstance(one, str) else one for one in inputs]
    check_prompts("answer", tails, context)
    return tails


def _texts(name: str, inputs: Sequence[Input], context: ModelContext) -> list[str]:
    texts = [one for one in inputs if isinstance(one, str)]
    for text in texts:
        check_characters(name, text, context)
    return texts


def _check_size(request: LogprobsRequest, rows: list[list[int]], starts: list[int]) -> None:
    """Raises Unprocessable for a response that would be too long."""
    scored = sum(map(len, rows)) - sum(starts)
    numbers = scored * (1 + 2 * request.top_logprobs)
    if numbers > MOST_NUMBERS:
        raise Unprocessable(
            f"`top_logprobs` of {request.top_logprobs} with {scored} tokens make {numbers} numbers; an answer has at "
            f"most {MOST_NUMBERS}",
            param="top_logprobs", code="out_of_range",
        )  # fmt: skip
    if request.encoding_format == "bytes" and len(rows) > MOST_BINARY_ROWS:
        raise Unprocessable(
            f"`encoding_format` `bytes` is for at most {MOST_BINARY_ROWS} rows, and there are {len(rows)}",
            param="encoding_format", code="out_of_range",
        )  # fmt: skip


def _written(write: Callable[[int, Arrays], types.ScoredTokens], index: int, row: Arrays) -> bytes:
    return to_json(write(index, row))


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes | types.Binary:
    request = context.request
    rows: dict[int, Arrays] = {}
    written: dict[int, msgspec.Raw] = {}  # rows in JSON: encoding all rows at the end would stall all streams
    write, cached = WRITERS.get(request.format_data), 0
    async for deltas in arriving:
        for delta in deltas:
            row = Arrays.of(request, delta.index, delta.extras.scores)
            cached += delta.usage.cached_tokens if delta.usage else 0
            if write is None:
                rows[delta.index] = row
            else:
                index, entries = delta.index, row.count * (1 + 2 * row.top)
                written[index] = msgspec.Raw(await made(partial(_written, write, index, row), entries))
    if write is None:
        return as_bytes([rows[index] for index in sorted(rows)])
    data = [written[index] for index in sorted(written)]
    return to_json(
        types.ScoredTokensList(
            id=context.id, created=context.created, model=request.model,
            data=cast(list[types.ScoredTokens], data),
            usage=chunk_writer.usage_of(Usage(request.prompt_tokens, 0, cached)),
        )
    )  # fmt: skip
