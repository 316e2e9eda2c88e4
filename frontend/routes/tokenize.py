"""Routes that need no worker: token ids, texts of ids, rendered prompts and counts.

vLLM's render routes: the token ids and the sampling parameters with which a request would be computed.

A gateway hashes the ids to find the worker whose cache has the prefix. These routes need no worker, so prompts have no
length limit until a worker has reported one. They refuse the same requests as the generating routes, in the same words.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType, to_builtins
from starlette.requests import Request
from starlette.responses import Response

from frontend.api.anthropic import messages
from frontend.api.anthropic.messages_request import MessageRequest
from frontend.api.llama_cpp import types
from frontend.api.openai import chat, completions, responses
from frontend.api.openai.chat_request import (
    MAX_TEXTS,
    ChatRequest,
    TemplateRequest,
    TokenizeRequest,
    chat_prompt,
    rendered_chat,
)
from frontend.api.openai.completions import CompletionRequest
from frontend.api.openai.responses_request import ResponseRequest
from frontend.api.openai.responses_types import InputTokens
from frontend.app_state import AppState, json_response
from frontend.chat.template_sandbox import with_template
from frontend.chat.tool_fields import shown
from frontend.errors import BadRequest, Unprocessable
from frontend.model_context import ModelContext, check_counted, check_ids, check_model
from frontend.request import GenerationRequest
from frontend.routes.generate import while_connected
from frontend.schema.base import EXACT, FieldError, JsonArray, RequestModel, ResponseModel, in_slices, made
from frontend.schema.request_fields import MOST_IDS, Count, GenerationFields, ModelName, TextIds, doc
from frontend.schema.responses import Prompt, Size, TokenizerInfo, TokenPiece, Tokens
from frontend.text.tokenizer import Tokenizer

Handler = Callable[[AppState, Request], Awaitable[Response]]
R = TypeVar("R", bound=RequestModel)

NO_LIMIT = 1 << 31  # replaces the length limit until a worker has reported one


class RenderedSampling(ResponseModel):
    """The sampling parameters, with vLLM's names."""

    n: Size
    max_tokens: Annotated[Size | None, Meta(description="null: up to the context's end, which is not known yet")]
    min_tokens: Size
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: list[str]
    stop_token_ids: list[Size]
    ignore_eos: bool
    logit_bias: dict[int, float] | None  # in JSON, the keys are strings
    allowed_token_ids: list[Size] | None
    bad_words: list[str]
    logprobs: Size | None
    prompt_logprobs: Size | None
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    structured_outputs: Annotated[
        dict[Literal["grammar"], str] | UnsetType,
        Meta(description="The grammar of the whole output, in llguidance's form"),
    ] = UNSET


class RenderedRequest(ResponseModel):
    """A request with token ids, in the form that vLLM's route for generating from token ids accepts."""

    request_id: str
    model: str
    token_ids: list[Size]
    sampling_params: RenderedSampling
    stream: bool
    stream_options: dict[str, bool] | None
    cache_salt: str | None
    priority: int
    features: Annotated[None, Meta(description="vLLM's field for images, which are refused here")] = None


class RenderedPrompt(RenderedRequest):
    """One prompt of a text completion. It repeats fields under the names that vLLM 0.16 to 0.18 used."""

    prompt: str
    prompt_token_ids: list[Size]


async def render_completion(request: CompletionRequest, context: ModelContext) -> list[RenderedPrompt]:
    """Returns each prompt of a text completion. Raises BadRequest or Unprocessable, which name the field."""
    ready = await completions.parse(request, _unbounded(context))
    sampling = await _sampling(ready, request.bad_words)
    texts = [
        one if isinstance(one, str) else context.tokenizer.decode(one, skip_special=False) for one in request.prompts
    ]
    return [
        RenderedPrompt(
            **_shared(request, ready, f"{completions.PREFIX}-"), token_ids=ids, prompt_token_ids=ids, prompt=text,
            sampling_params=sampling,
        )
        for text, ids in zip(texts, ready.prompts, strict=True)
    ]  # fmt: skip


async def render_chat(request: ChatRequest, context: ModelContext) -> RenderedRequest:
    """Returns the prompt of a chat. Raises BadRequest or Unprocessable, which name the field."""
    ready = await chat.parse(request, _unbounded(context))
    return await _rendered(request, ready, f"{chat.PREFIX}-", request.bad_words)


async def render_response(request: ResponseRequest, context: ModelContext) -> RenderedRequest:
    """Returns the prompt of a response. Raises BadRequest or Unprocessable, which name the field."""
    ready = await responses.parse(request, _unbounded(context))
    return await _rendered(request, ready, f"{responses.PREFIX}_", request.bad_words)


async def render_message(request: MessageRequest, context: ModelContext) -> RenderedRequest:
    """Returns the prompt of a message. Raises BadRequest or Unprocessable, which name the field."""
    ready = await messages.parse(request, _unbounded(context))
    return await _rendered(request, ready, f"{messages.PREFIX}_", None)


async def _rendered(
    request: GenerationFields, ready: GenerationRequest, prefix: str, bad_words: Sequence[str] | None
) -> RenderedRequest:
    """Returns the prompt of a conversation. prefix: of the request's id"""
    if ready.features.images:
        raise Unprocessable(
            f"`{ready.param}`: a chat with images cannot be rendered", param=ready.param, code="unsupported_field"
        )
    (ids,) = ready.prompts
    return RenderedRequest(
        **_shared(request, ready, prefix), token_ids=ids, sampling_params=await _sampling(ready, bad_words)
    )


def _unbounded(context: ModelContext) -> ModelContext:
    return context if context.max_seq_len else replace(context, max_seq_len=NO_LIMIT)


def _shared(request: GenerationFields, ready: GenerationRequest, prefix: str) -> dict[str, Any]:
    """Returns the fields that are the same for all prompts."""
    options = request.stream_options
    return {
        "request_id": f"{prefix}{secrets.token_hex(12)}",
        "model": ready.model,
        "stream": ready.stream,
        "stream_options": to_builtins(options) if options else None,
        "cache_salt": ready.admission.cache_salt or None,
        "priority": ready.admission.priority,
    }


async def _sampling(ready: GenerationRequest, bad_words: Sequence[str] | None) -> RenderedSampling:
    chosen = ready.sampling
    await asyncio.sleep(0)  # long lists take some milliseconds to read, to copy and to encode; streams come in between
    rendered = RenderedSampling(
        n=ready.n,
        max_tokens=chosen.max_tokens if chosen.max_tokens < NO_LIMIT >> 1 else None,
        min_tokens=chosen.min_tokens,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        min_p=chosen.min_p,
        repetition_penalty=chosen.repetition_penalty,
        presence_penalty=chosen.presence_penalty,
        frequency_penalty=chosen.frequency_penalty,
        seed=chosen.seed,
        stop=[*ready.stops],
        stop_token_ids=[*chosen.stop_token_ids],
        ignore_eos=chosen.ignore_eos,
        logit_bias=dict(chosen.logit_bias) or None,
        allowed_token_ids=[*chosen.allowed_token_ids] or None,
        bad_words=[*(bad_words or ())],
        logprobs=chosen.logprobs,
        prompt_logprobs=ready.features.prompt_logprobs,
        include_stop_str_in_output=ready.shown.stop,
        skip_special_tokens=not ready.shown.specials,
        structured_outputs={"grammar": chosen.grammar} if chosen.grammar else UNSET,
    )
    await asyncio.sleep(0)
    return rendered


RESPONSES: Mapping[str, Any] = {"RenderedPrompts": list[RenderedPrompt], "RenderedRequest": RenderedRequest}


def paths(
    post: Callable[..., dict[str, Any]], error: dict[str, str], anthropic_error: dict[str, str]
) -> dict[str, Any]:
    """Describes the routes for /openapi.json. post: a function that describes one POST route"""
    text = post("Show the token ids of a text", "CompletionRequest", "RenderedPrompts", error, operation="RenderText")
    answers = text["post"]["responses"]
    answers["404"] = answers.pop("422")  # unlike /v1/completions, this route has the chat routes' statuses
    answers["404"]["description"] = "The model of that name is not served"
    return {
        "/v1/completions/render": text,
        "/v1/chat/completions/render": post(
            "Show the token ids of a chat", "ChatCompletionRequest", "RenderedRequest", error, operation="RenderChat"
        ),
        "/v1/responses/render": post(
            "Show the token ids of a response", "ResponseRequest", "RenderedRequest", error, operation="RenderResponse"
        ),
        "/v1/messages/render": post(
            "Show the token ids of a message",
            "MessageRequest",
            "RenderedRequest",
            anthropic_error,
            operation="RenderMessage",
        ),
    }


# Turns text or chat messages into token ids and back, without a worker.


_ids: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_SEVERAL = {"anyOf": [_ids, {"type": "array", "items": _ids, "maxItems": MAX_TEXTS}]}


class DetokenizeRequest(RequestModel):
    tokens: Annotated[
        Annotated[list[Count | TextIds], Meta(max_length=MOST_IDS, extra_json_schema=_SEVERAL)],
        doc("The token ids of a text, or of several"),
    ]
    skip_special_tokens: Annotated[bool, doc("true: leave special tokens out of the text")] = False
    model: ModelName = None

    def __post_init__(self) -> None:
        several = [isinstance(one, list) for one in self.tokens]
        if any(several) and not all(several):
            raise FieldError("tokens", "must be an array of token ids or of arrays", BadRequest, "wrong_type")
        if any(several) and len(several) > MAX_TEXTS:
            raise FieldError("tokens", f"may have at most {MAX_TEXTS} arrays")


async def tokenize(request: TokenizeRequest, context: ModelContext) -> Tokens:
    """Encodes `prompt`, by default with the tokenizer's special tokens, or else `messages`, rendered as a chat.

    Several texts have several arrays of ids, as in SGLang.
    """
    check_model(request.model, context)
    prompt, special, longest = request.prompt, request.add_special_tokens, context.max_seq_len
    if (prompt is None) == (request.messages is None):
        raise BadRequest("give either `prompt` or `messages`", param="prompt")
    if prompt is None:
        if special:
            raise Unprocessable(
                "`add_special_tokens`: a chat template writes its own", param="add_special_tokens", code="out_of_range"
            )
        context = with_template(context.unlimited, request.chat_template)
        ids = (await chat_prompt(request, await shown(request.tools, request.tool_choice), context)).ids
    elif isinstance(prompt, list):
        check_counted("prompt", sum(map(len, prompt)), context)
        several = await context.tokenizer.encode_batch(prompt, special is not False)
        return Tokens(tokens=[*several], count=[len(one) for one in several], max_model_len=longest or None)
    else:
        check_counted("prompt", len(prompt), context)
        ids = await context.tokenizer.encode(prompt, special is not False)
    return Tokens(tokens=[*ids], count=len(ids), max_model_len=longest or None)


async def detokenize(request: DetokenizeRequest, context: ModelContext) -> Prompt:
    """Decodes the ids of a text. Several arrays of ids have several texts, as in SGLang."""
    check_model(request.model, context)
    one = [id for id in request.tokens if isinstance(id, int)]
    several = [ids for ids in request.tokens if isinstance(ids, list)]
    check_counted("tokens", sum(map(len, [one, *several])), context)
    for ids in (one, *several):
        check_ids("tokens", ids, context.vocab_size)

    async def decoded(ids: list[int]) -> str:
        decode = partial(context.tokenizer.decode, ids, skip_special=request.skip_special_tokens)
        return await made(decode, len(ids))

    text = [await decoded(ids) for ids in several] if several else await decoded(one)
    return Prompt(prompt=text, content=text, text=text)


def info(context: ModelContext) -> TokenizerInfo:
    """Returns facts for evaluation harnesses that do not have the tokenizer. The same route exists in vLLM."""
    tokenizer = context.tokenizer
    return TokenizerInfo(
        bos_token=tokenizer.named_tokens.get("bos_token"),
        eos_token=tokenizer.named_tokens.get("eos_token"),
        pad_token=tokenizer.named_tokens.get("pad_token"),
        unk_token=tokenizer.named_tokens.get("unk_token"),
        chat_template=tokenizer.templates.get("default"),
        vocab_size=context.vocab_size,
    )


# /tokenize and /detokenize, which vLLM, SGLang and llama.cpp have. A body with `content` is in llama.cpp's format.

MAX_PARTS = 4096


class AnyTokenizeRequest(TokenizeRequest):
    content: Annotated[
        str | Annotated[list[str | Annotated[int, EXACT]], Meta(max_length=MAX_PARTS)] | None,
        doc("Llama.cpp's: a text, or texts and token ids"),
    ] = None
    add_special: Annotated[bool, doc("With `content`: with the tokenizer's special tokens")] = False
    parse_special: Annotated[bool, doc("With `content`: false: spellings of special tokens are text")] = True
    with_pieces: Annotated[bool, doc("With `content`: each token as `id` and `piece`")] = False
    return_token_strs: Annotated[bool, doc("Add `token_strs`: the text of each token")] = False


async def any_tokenize(request: AnyTokenizeRequest, context: ModelContext) -> Tokens:
    """Encodes `content`. A body without `content` is handled as vLLM's."""
    if request.content is None:
        answer = await tokenize(request, context)
        if request.return_token_strs and isinstance(answer.count, list):
            raise Unprocessable(
                "`return_token_strs` cannot go with several texts", param="return_token_strs", code="conflicting_fields"
            )
        ids = cast(list[int], answer.tokens)
    else:
        ids = await _content_ids(request, context)
        answer = Tokens(tokens=[*ids], count=len(ids), max_model_len=context.max_seq_len or None)
        if request.with_pieces:
            pieces: Any = await _encoded(lambda id: _piece(id, context.tokenizer), ids)
            answer.tokens = pieces
    if request.return_token_strs:
        texts: Any = await _encoded(context.tokenizer.token_text, ids)
        answer.token_strs = texts
    return answer


async def _content_ids(request: AnyTokenizeRequest, context: ModelContext) -> list[int]:
    check_model(request.model, context)
    for name in ("prompt", "messages"):
        if getattr(request, name) is not None:
            raise Unprocessable(f"`{name}` cannot go with `content`", param=name, code="conflicting_fields")
    ids = await _ids_of(request, context)
    check_ids("content", ids, context.vocab_size)
    return ids


async def _encoded(write: Callable[[int], Any], ids: list[int]) -> msgspec.Raw:
    """Returns what `write` returns for each id as an array in JSON, made in slices."""
    entries = JsonArray()
    await in_slices(ids, lambda id: entries.append(write(id)))
    return entries.raw


async def _ids_of(request: AnyTokenizeRequest, context: ModelContext) -> list[int]:
    """Encodes texts, and keeps ids as they are. The tokenizer's special tokens are added only before a leading text."""
    tokenizer = context.tokenizer
    parts = [request.content] if isinstance(request.content, str) else request.content or []
    check_counted("content", sum(len(one) if isinstance(one, str) else 1 for one in parts), context)
    encode = tokenizer.encode_batch if request.parse_special else tokenizer.encode_plain
    first, rest = parts[:1], parts[1:]
    begins = iter(await encode([one for one in first if isinstance(one, str)], request.add_special))
    follows = iter(await encode([one for one in rest if isinstance(one, str)], False))
    ids = [id for one in first for id in (next(begins) if isinstance(one, str) else [one])]
    return ids + [id for one in rest for id in (next(follows) if isinstance(one, str) else [one])]


def _piece(id: int, tokenizer: Tokenizer) -> TokenPiece:
    """Returns a token with its text, or with its bytes if they are only part of a character."""
    if id in tokenizer.special_ids:
        return TokenPiece(id=id, piece=tokenizer.token_text(id))
    raw = tokenizer.token_bytes(id)
    try:
        return TokenPiece(id=id, piece=raw.decode())
    except UnicodeDecodeError:
        return TokenPiece(id=id, piece=list(raw))


# llama.cpp's /apply-template: the text of a chat's prompt, without tokens that the tokenizer adds by itself.
#
# /chat/completions/input_tokens counts the tokens of that prompt.


async def apply_template(request: TemplateRequest, context: ModelContext) -> types.LlamaCppPrompt:
    """Renders the prompt of messages as a chat does.

    /completion turns this text into the same tokens, unless a message spells a special token. The chat treats that
    spelling as plain text, and /completion does not.
    """
    check_model(request.model, context)
    context = with_template(context.unlimited, request.chat_template)
    text = (await rendered_chat(request, await shown(request.tools, request.tool_choice), context)).text
    bos = context.tokenizer.named_tokens.get("bos_token") or ""
    (lead,) = await context.tokenizer.encode_batch([""])
    added = bool(bos) and context.tokenizer.decode(lead, skip_special=False).startswith(bos)
    return types.LlamaCppPrompt(prompt=text.removeprefix(bos) if added else text)


async def count_tokens(request: TemplateRequest, context: ModelContext) -> InputTokens:
    """Returns the number of input tokens that a chat with this body would have."""
    check_model(request.model, context)
    context = with_template(context.unlimited, request.chat_template)
    prompt = await chat_prompt(request, await shown(request.tools, request.tool_choice), context)
    return InputTokens(input_tokens=len(prompt.ids))


# The handlers of these routes


def answering(kind: type[R], function: Callable[[R, ModelContext], Coroutine[Any, Any, Any]]) -> Handler:
    """Returns a route handler that decodes the body into `kind`, calls `function` and responds with its result."""

    async def handler(app: AppState, request: Request) -> Response:
        decoded = await app.decode(request, await app.body(request), kind)
        model = await app.usable_model(request, decoded, computing=False)
        return json_response(await while_connected(request, function(decoded, model.context)))

    return handler


post_tokenize = answering(AnyTokenizeRequest, any_tokenize)
post_detokenize = answering(DetokenizeRequest, detokenize)
post_completion = answering(CompletionRequest, render_completion)
post_chat = answering(ChatRequest, render_chat)
post_response = answering(ResponseRequest, render_response)
post_message = answering(MessageRequest, render_message)
post_template = answering(TemplateRequest, apply_template)
post_chat_tokens = answering(TemplateRequest, count_tokens)
