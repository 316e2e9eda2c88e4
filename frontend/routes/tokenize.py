"""vLLM's render routes: the token ids and the sampling parameters with which a request would be computed.

A gateway hashes the ids to find the worker whose cache has the prefix. These routes need no worker, so prompts have no
length limit until a worker has reported one. They refuse the same requests as the generating routes, in the same words.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType, to_builtins

from frontend.api.model_context import ModelContext
from frontend.api.openai import chat, completions
from frontend.api.openai.chat_input import ChatRequest
from frontend.api.openai.completions_input import CompletionRequest
from frontend.api.requests.response_types import Count, ResponseModel
from frontend.errors import Unprocessable
from frontend.request import GenerationRequest

NO_LIMIT = 1 << 31  # replaces the length limit until a worker has reported one


class RenderedSampling(ResponseModel):
    """The sampling parameters, with vLLM's names."""

    n: Count
    max_tokens: Annotated[Count | None, Meta(description="null: up to the context's end, which is not known yet")]
    min_tokens: Count
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: list[str]
    stop_token_ids: list[Count]
    ignore_eos: bool
    logit_bias: dict[str, float] | None
    allowed_token_ids: list[Count] | None
    bad_words: list[str]
    logprobs: Count | None
    prompt_logprobs: Count | None
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
    token_ids: list[Count]
    sampling_params: RenderedSampling
    stream: bool
    stream_options: dict[str, bool] | None
    cache_salt: str | None
    priority: int
    features: Annotated[None, Meta(description="vLLM's field for pictures, which are refused here")] = None


class RenderedPrompt(RenderedRequest):
    """One prompt of a text completion. It repeats fields under the names that vLLM 0.16 to 0.18 used."""

    prompt: str
    prompt_token_ids: list[Count]


async def render_completion(request: CompletionRequest, context: ModelContext) -> list[RenderedPrompt]:
    """Returns each prompt of a text completion. Raises BadRequest or Unprocessable, which name the field."""
    ready = await completions.parse(request, _unbounded(context))
    sampling = _sampling(request, ready)
    texts = [
        one if isinstance(one, str) else context.tokenizer.decode(one, skip_special=False) for one in request.prompts
    ]
    return [
        RenderedPrompt(**_shared(request, ready, "cmpl"), token_ids=ids, prompt_token_ids=ids, prompt=text,
                       sampling_params=sampling)
        for text, ids in zip(texts, ready.prompts, strict=True)
    ]  # fmt: skip


async def render_chat(request: ChatRequest, context: ModelContext) -> RenderedRequest:
    """Returns the prompt of a chat. Raises BadRequest or Unprocessable, which name the field."""
    ready = await chat.parse(request, _unbounded(context))
    if ready.features.pictures:
        raise Unprocessable(
            "`messages`: a chat with pictures cannot be rendered", param="messages", code="unsupported_field"
        )
    (ids,) = ready.prompts
    return RenderedRequest(
        **_shared(request, ready, "chatcmpl"), token_ids=ids, sampling_params=_sampling(request, ready)
    )


def _unbounded(context: ModelContext) -> ModelContext:
    return context if context.max_seq_len else replace(context, max_seq_len=NO_LIMIT)


def _shared(request: CompletionRequest | ChatRequest, ready: GenerationRequest, prefix: str) -> dict[str, Any]:
    """Returns the fields that are the same for all prompts."""
    options = request.stream_options
    return {
        "request_id": f"{prefix}-{secrets.token_hex(12)}",
        "model": ready.model,
        "stream": ready.stream,
        "stream_options": to_builtins(options) if options else None,
        "cache_salt": ready.admission.cache_salt or None,
        "priority": ready.admission.priority,
    }


def _sampling(request: CompletionRequest | ChatRequest, ready: GenerationRequest) -> RenderedSampling:
    chosen = ready.sampling
    return RenderedSampling(
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
        logit_bias={str(id): bias for id, bias in chosen.logit_bias} or None,
        allowed_token_ids=[*chosen.allowed_token_ids] or None,
        bad_words=[*(request.bad_words or ())],
        logprobs=chosen.logprobs,
        prompt_logprobs=ready.features.prompt_logprobs,
        include_stop_str_in_output=ready.shown.stop,
        skip_special_tokens=not ready.shown.specials,
        structured_outputs={"grammar": chosen.grammar} if chosen.grammar else UNSET,
    )


RESPONSES: Mapping[str, Any] = {"RenderedPrompts": list[RenderedPrompt], "RenderedRequest": RenderedRequest}


def paths(post: Callable[..., dict[str, Any]], error: dict[str, str]) -> dict[str, Any]:
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
    }
