"""/v1/logprobs: the log-probabilities of given texts, as arrays.

A prompt is scored from its second token on. If there are answers, only these are scored, and a prompt that they share
is computed once. Prompt and answer are tokenized separately, so no token spans the boundary between them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from frontend.api.chat.own_template import with_template
from frontend.api.chat.tool_fields import FunctionTools, offered
from frontend.api.context_length import check_characters
from frontend.api.model_context import ModelContext, check_model
from frontend.api.openai import completions
from frontend.api.openai.chat_input import Messages, Template, TokenizeRequest, chat_prompt
from frontend.api.openai.completions_input import prompts_schema
from frontend.api.pooling import response_types as types
from frontend.api.pooling.fields import MAX_INPUTS, PoolingFields, admission, check_prompts
from frontend.api.pooling.logprob_arrays import Arrays, as_base64, as_bytes, as_lists
from frontend.api.requests.encoding import made, to_json
from frontend.api.requests.request_model import EXACT, FieldError
from frontend.api.requests.request_types import TemplateArguments, doc
from frontend.api.response_context import AsyncDeltas, ResponseContext
from frontend.errors import BadRequest, Unprocessable, api_status
from frontend.features import Features, Scored
from frontend.request import GenerationRequest, Shown, Usage
from shared.messages import Sampling

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
        model=context.model, shown=Shown(ids=request.return_token_ids), admission=admission(request),
        features=Features(
            scored=Scored(tuple(starts), one_group=len(heads) == 1 < len(rows)), adapter=context.adapter
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
            usage=completions.usage_of(Usage(request.prompt_tokens, 0, cached)),
        )
    )  # fmt: skip
