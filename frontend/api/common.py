"""Shared by all API formats: model facts, checks, sampling parameters, usage and timings.

Knows JSON and tokens; knows no format's envelope and no HTTP.
"""

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Self

import msgspec
from msgspec import UNSET, UnsetType

from frontend.api import response_types
from frontend.api.decoding import reader, refuse_unknown
from frontend.api.fingerprint import combined, text_fingerprint
from frontend.api.receipts.signing import Signer
from frontend.api.request_model import SMALLEST, fields_of
from frontend.api.request_types import GenerationFields, OpenAIFields
from frontend.errors import BadRequest, SluiceError, Unprocessable
from frontend.output_parser.formats import ModelFormat
from frontend.request import Delta, GenerationRequest, Usage
from frontend.text.chat_template import ChatTemplate
from frontend.text.tokenizer import Tokenizer
from shared.config import FrontendConfig
from shared.messages import Limits, Sampling, Timings
from shared.task import GENERATE, Task

AsyncDeltas = AsyncIterator[list[Delta]]  # each list has all that arrived since the previous list

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words",
)  # fmt: skip
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # what a checkpoint may recommend


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Facts about the model that reading a request needs."""

    model: str  # the served name, which responses have
    max_seq_len: int  # tokens, prompt + output; 0: no limit, or none known before a worker has reported it
    vocab_size: int
    tokenizer: Tokenizer
    template: ChatTemplate
    stream_format: str = "openai"  # of /v1/completions, if the body names none
    style: ModelFormat = field(default_factory=ModelFormat)  # how the model writes reasoning and tool calls
    recommended: Mapping[str, Any] = field(default_factory=dict)  # defaults of sampling fields, by the model's authors
    names: frozenset[str] = frozenset()  # the model's other names
    any_name: bool = False  # accept every name
    task: Task = GENERATE
    hidden_size: int = 0  # dimensions of an embedding; 0 before a worker has reported it
    trusts_templates: bool = False  # a request may bring its own chat template
    text_fingerprint: str = ""  # of how prompts are made, see fingerprint.py

    @classmethod
    def of(cls, names: Sequence[str], tokenizer: Tokenizer, config: FrontendConfig) -> Self:
        """Returns the context before any worker has reported its limits."""
        style = ModelFormat.of(tokenizer.templates, config.tool_format, config.reasoning_format)
        defaults = recommended(tokenizer.generation) if config.sampling_defaults == "model" else {}
        return cls(
            names[0], 0, tokenizer.vocab_size, tokenizer, ChatTemplate(tokenizer.templates, tokenizer.named_tokens),
            config.completions_stream_format, style, defaults, frozenset(names), config.any_model_name, tokenizer.task,
            trusts_templates=config.trust_request_chat_template,
            text_fingerprint=text_fingerprint(tokenizer, style, defaults),
        )  # fmt: skip

    @property
    def unlimited(self) -> Self:
        """The context for a prompt that is only counted."""
        return replace(self, max_seq_len=0)

    def fingerprint_with(self, worker: str) -> str:
        """Returns the fingerprint of answers that workers with the fingerprint `worker` compute; "" if that is ""."""
        return combined(worker, self.text_fingerprint) if worker else ""

    def within(self, limits: Limits | None) -> Self:
        """Returns the context with a worker's limits; unchanged if no worker has reported them."""
        if limits is None:
            return self
        return replace(
            self, max_seq_len=limits.max_seq_len, vocab_size=limits.vocab_size, hidden_size=limits.hidden_size
        )


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """Everything that writing a response needs in addition to its deltas."""

    request: GenerationRequest
    tokenizer: Tokenizer
    prefix: str = "cmpl"
    fingerprint: str = ""  # of the server, see shared/fingerprint.py; empty if its workers make none
    route: str = ""  # the path of the request
    signer: Signer | None = None  # signs receipts
    nonce: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    event_numbers: Iterator[int] = field(default_factory=count)  # for API formats that number their events

    @property
    def id(self) -> str:
        return f"{self.prefix}-{self.nonce}"

    @property
    def system_fingerprint(self) -> str | None:
        """The fingerprint as OpenAI's formats have it."""
        return self.fingerprint or None

    def token_text(self, id: int) -> str:
        """Returns how log-probabilities name a token."""
        return f"token_id:{id}" if self.request.tokens_as_ids else self.tokenizer.token_text(id)


def check_model(name: str | None, context: ModelContext) -> None:
    """Raises Unprocessable for a name that the model does not have. No name means the served one."""
    if name and name != context.model and name not in context.names and not context.any_name:
        raise Unprocessable(
            f"`model`: the model `{name}` does not exist; this server serves `{context.model}`",
            param="model",
            code="model_not_found",
        )


def check_task(what: str, tasks: Sequence[str], context: ModelContext) -> None:
    """Raises BadRequest if the server's task is none of those that `what`, a route or a method, needs."""
    if context.task.name not in tasks:
        raise BadRequest(
            f"{what} needs a server with --task {' or '.join(tasks)}; this one serves --task {context.task.name}",
            code="task_not_served",
        )


def check_ids(name: str, ids: list[int] | tuple[int, ...], vocab_size: int) -> None:
    """Raises Unprocessable when an id lies outside the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise Unprocessable(f"`{name}` has token ids outside 0 to {vocab_size - 1}", param=name, code="out_of_range")


def sampling(request: GenerationFields, max_tokens: int, context: ModelContext, **more: Any) -> Sampling:
    """Makes the wire's Sampling. An absent field has the checkpoint's recommendation or else Sampling's default.

    more: the fields that only some API formats have
    """
    given = {name: value for name in SAMPLING if (value := getattr(request, name, None)) is not None}
    values = {name: _for_worker(name, value, context) for name, value in {**context.recommended, **given}.items()}
    if values.get("min_tokens", 0) > max_tokens:
        raise Unprocessable("`min_tokens` is more than the tokens asked for", param="min_tokens", code="out_of_range")
    return Sampling(max_tokens=max_tokens, **values, **more)


def _for_worker(name: str, value: Any, context: ModelContext) -> Any:
    match name:
        case "seed":
            return value % (1 << 64)  # the same integer of 64 bits, as unsigned
        case "top_k":
            # 0 and -1: from all tokens; a number above the vocabulary's means the same, and may not fit the wire
            return min(value, context.vocab_size) if value > 0 else 0
        case "stop_token_ids":
            check_ids(name, value, context.vocab_size)
            return tuple(value)
        case "allowed_token_ids":
            if not value:
                raise Unprocessable(f"`{name}` is empty, so no token is allowed", param=name, code="out_of_range")
            check_ids(name, value, context.vocab_size)
            return tuple(dict.fromkeys(value))
        case "bad_words":
            return _bad_words(value, context.tokenizer)
        case "logit_bias":
            check_ids(name, list(value), context.vocab_size)
            return tuple((token, _float32(bias)) for token, bias in value.items())
    return _float32(value) if type(value) is float else value


def _bad_words(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Returns the ids of each word, as it stands at the beginning of a text and after a space."""
    bare = [word.lstrip() or word for word in words]
    encoded = tokenizer.encode_now([*bare, *[" " + word for word in bare]], False)
    return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))


def before_truncation(kept: int | None, context: ModelContext) -> ModelContext:
    """Returns the context in which a prompt is read that `truncated` shortens: any length is right."""
    return context if kept is None else context.unlimited


def truncated(ids: list[int], most: int | None, kept: int | None, context: ModelContext) -> list[int]:
    """Returns the last `kept` ids of a prompt; all if it is None, and as many as leave room for the answer if it is -1.

    most: the limit on new tokens, if there is one
    """
    if kept is None:
        return ids
    if kept == 0 or kept > context.max_seq_len:
        raise Unprocessable(
            f"`truncate_prompt_tokens` must be -1 or from 1 to {context.max_seq_len}, got {kept}",
            param="truncate_prompt_tokens", code="out_of_range",
        )  # fmt: skip
    if kept < 0 and (kept := context.max_seq_len - (most or 1)) <= 0:
        return ids  # check_length says that the answer alone is too long
    return ids[-kept:]


def _float32(value: float) -> float:
    """Returns the value, or 0 if it is too small for the worker's float32."""
    return value if abs(value) >= SMALLEST else 0.0


def recommended(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling fields that a checkpoint's generation_config.json recommends; none if it says not to sample.

    A value that no request could have is ignored.
    """
    if generation.get("do_sample") is False:
        return {}
    found: dict[str, Any] = {}
    for name in RECOMMENDED:
        with suppress(SluiceError):
            if (value := generation.get(name)) is not None:
                found[name] = reader(fields_of(OpenAIFields)[name].type)(value, name, refuse_unknown)
    return found


def generation_request(
    request: GenerationFields, context: ModelContext, prompts: tuple[list[int], ...], chosen: Sampling, **more: Any
) -> GenerationRequest:
    """Makes a GenerationRequest; `more` has the fields that only this request's API format has."""
    options = request.stream_options
    return GenerationRequest(
        prompts=prompts, sampling=chosen, stream=request.stream, timings=request.timings, model=context.model,
        receipt=request.receipt,
        cache_salt=request.cache_salt or "", priority=request.priority, deadline_ms=request.deadline_ms or 0,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats), **_shown(request), **more,
    )  # fmt: skip


def _shown(request: GenerationFields) -> dict[str, Any]:
    """Returns what a request of OpenAI's formats asks to see; nothing for a format without these fields."""
    asks = partial(getattr, request)
    if asks("prompt_logprobs", None) is not None and request.stream:
        raise Unprocessable(
            "`prompt_logprobs` are not available in a stream", param="prompt_logprobs", code="conflicting_fields"
        )
    return {
        "return_ids": asks("return_token_ids", False), "tokens_as_ids": asks("return_tokens_as_token_ids", False),
        "prompt_logprobs": asks("prompt_logprobs", None),
        "includes_stop": asks("include_stop_str_in_output", False) or asks("no_stop_trim", False),
        "shows_specials": not asks("skip_special_tokens", True), 
        "hides_reasoning": not asks("include_reasoning", True) or getattr(asks("reasoning", None), "exclude", False),
    }  # fmt: skip


class Totals:
    """Folds the deltas of all choices into one usage and one set of timings."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.reasoning_tokens: int | None = None  # set by those who count them
        self._completion = [0] * (len(request.prompts) * request.n)
        self._cached: dict[int, int] = {}
        self._timings: list[Timings] = []
        self._last: dict[int, float] = {}
        self._gaps: list[float] = []

    def add(self, delta: Delta) -> None:
        if self.request.timings and delta.ids:
            self._tick(delta)
        if delta.usage is not None:
            self._completion[delta.index] = delta.usage.completion_tokens
        if delta.finish is not None and delta.usage is not None:
            prompt = delta.index // self.request.n
            cached = delta.usage.cached_tokens
            self._cached[prompt] = min(cached, self._cached.get(prompt, cached))
        if delta.timings is not None:
            self._timings.append(delta.timings)

    def _tick(self, delta: Delta) -> None:
        now = time.perf_counter()
        last = self._last.get(delta.index)
        self._last[delta.index] = now
        if last is not None:
            self._gaps += [(now - last) * 1e3 / len(delta.ids)] * len(delta.ids)

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many choices continue it."""
        request, cached = self.request, sum(self._cached.values())
        return Usage(
            request.prompt_tokens, sum(self._completion), cached, len(request.continued), self.reasoning_tokens
        )

    @property
    def timings(self) -> response_types.Timings | UnsetType:
        """Times of the slowest choice, if requested. Inter-token times are those that this process measured."""
        if not self.request.timings:
            return UNSET
        gaps = sorted(self._gaps) or [0.0]
        return response_types.Timings(
            queue_ms=self._slowest("queue_ms"),
            prefill_ms=self._slowest("prefill_ms"),
            decode_ms=self._slowest("decode_ms"),
            cached_tokens=sum(self._cached.values()),
            inter_token_p50_ms=round(gaps[len(gaps) // 2], 3),
            inter_token_p99_ms=round(gaps[len(gaps) * 99 // 100], 3),
        )

    def _slowest(self, part: str) -> float:
        return round(max((getattr(timings, part) for timings in self._timings), default=0.0), 3)


to_json = msgspec.json.encode
