"""What all dialects share: the table of sampling fields, the facts of a request, usage and timings.

Knows JSON and tokens; knows no dialect's envelope and no HTTP.
"""

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Self

import msgspec

from frontend.api.fields import (
    Field,
    Table,
    anything,
    bias,
    boolean,
    flags,
    integer,
    list_of,
    number,
    one_or_more,
    only,
    refused,
    seed,
    some_text,
)
from frontend.errors import SluiceError, Unprocessable
from frontend.output_parser.formats import ModelFormat
from frontend.request import Delta, GenerationRequest, Usage
from frontend.text.chat_template import ChatTemplate
from frontend.text.tokenizer import Tokenizer
from shared.config import FrontendConfig
from shared.messages import Limits, Sampling, Timings

AsyncDeltas = AsyncIterator[list[Delta]]  # each list is all that arrived since the last one

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_CHOICES = 128

SAMPLING: Table = {
    "temperature": Field(number(0), fallback=1.0),
    "top_p": Field(number(0, 1, above=True), fallback=1.0),
    "top_k": Field(integer(1), fallback=0),
    "min_p": Field(number(0, 1), fallback=0.0),
    "repetition_penalty": Field(number(1e-6, 1e6), fallback=1.0),
    "presence_penalty": Field(number(-2, 2), 0.0),
    "frequency_penalty": Field(number(-2, 2), 0.0),
    "logit_bias": Field(bias, ()),
    "seed": Field(seed),
    "min_tokens": Field(integer(0), 0),
    "ignore_eos": Field(boolean, False),
    "stop_token_ids": Field(list_of(integer(0), 1024), ()),
}

# What a checkpoint may say better than we do.
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# As in vLLM, a lower `priority` goes first; the time limit counts from when the request has arrived.
QUEUING: Table = {
    "priority": Field(integer(-(1 << 31), (1 << 31) - 1), 0),
    "deadline_ms": Field(integer(1, (1 << 31) - 1), 0),
}

# What clients of other servers say though they mean nothing by it: it is how we answer in any case.
ELSEWHERE: Table = {
    "use_beam_search": Field(only(False)),
    "length_penalty": Field(only(1.0)),
    "early_stopping": Field(only(False)),
    "include_stop_str_in_output": Field(only(False)),
    "no_stop_trim": Field(only(False)),
    "skip_special_tokens": Field(only(True)),
    "spaces_between_special_tokens": Field(only(True)),
    "return_token_ids": Field(only(False)),
    "return_tokens_as_token_ids": Field(only(False)),
    "include_reasoning": Field(only(True)),
    "separate_reasoning": Field(only(True)),
    "stream_reasoning": Field(only(True)),
    "bad_words": Field(only([])),
    "logits_processors": Field(only([])),
    "allowed_token_ids": Field(refused),
    "prompt_logprobs": Field(refused),
    "truncate_prompt_tokens": Field(refused),
}

OPENAI: Table = {
    **SAMPLING,
    **QUEUING,
    "model": Field(some_text, required=True),
    "stop": Field(one_or_more(some_text, MAX_STOPS), ()),
    "n": Field(integer(1, MAX_CHOICES), 1),
    "stream": Field(boolean, False),
    "stream_options": Field(flags("include_usage", "continuous_usage_stats", "include_obfuscation"), {}),
    "timings": Field(boolean, False),
    "cache_salt": Field(some_text, ""),
    "user": Field(anything),
    "metadata": Field(anything),
    "store": Field(anything),
    "service_tier": Field(anything),
    "prompt_cache_key": Field(anything),
    "prompt_cache_options": Field(anything),
    "prompt_cache_retention": Field(anything),
    "safety_identifier": Field(anything),
    **ELSEWHERE,
}


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What must be known to read a request."""

    model: str  # the served name
    max_seq_len: int  # tokens, prompt + output; 0 before a worker has said so
    vocab_size: int
    tokenizer: Tokenizer
    template: ChatTemplate
    stream_format: str = "openai"  # of /v1/completions, when the body does not say
    style: ModelFormat = field(default_factory=ModelFormat)  # how the model thinks and calls
    recommended: Mapping[str, Any] = field(default_factory=dict)  # by who made the model: fields' defaults

    @classmethod
    def of(cls, name: str, tokenizer: Tokenizer, config: FrontendConfig) -> Self:
        """What is known before a worker has said its limits."""
        return cls(
            name, 0, tokenizer.vocab_size, tokenizer, ChatTemplate(tokenizer.templates, tokenizer.named_tokens),
            config.completions_stream_format,
            ModelFormat.of(tokenizer.templates, config.tool_format, config.reasoning_format),
            recommended(tokenizer.generation) if config.sampling_defaults == "model" else {},
        )  # fmt: skip

    def within(self, limits: Limits | None) -> Self:
        """The same with a worker's limits, where one has said them."""
        return replace(self, max_seq_len=limits.max_seq_len, vocab_size=limits.vocab_size) if limits else self


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """What the rendering of an answer needs besides its deltas."""

    request: GenerationRequest
    tokenizer: Tokenizer
    prefix: str = "cmpl"
    nonce: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    event_numbers: Iterator[int] = field(default_factory=count)  # for API formats that number their events

    @property
    def id(self) -> str:
        return f"{self.prefix}-{self.nonce}"


def check_model(name: str | None, context: ModelContext) -> None:
    """Raises Unprocessable for any name but the served one; None stands for that."""
    if name not in (None, context.model):
        raise Unprocessable(
            f"`model` is `{name}`, which is not served here; `{context.model}` is",
            param="model",
            code="model_not_found",
        )


def check_ids(name: str, ids: list[int] | tuple[int, ...], vocab_size: int) -> None:
    """Raises Unprocessable when an id lies outside the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise Unprocessable(f"`{name}` has token ids outside 0 to {vocab_size - 1}", param=name, code="out_of_range")


def check_length(param: str, prompt: int, output: int, context: ModelContext) -> None:
    if prompt + output > context.max_seq_len:
        raise Unprocessable(
            f"`{param}` has {prompt} tokens; with {output} more for the answer that is more than this model's "
            f"{context.max_seq_len}",
            param=param,
            code="context_length_exceeded",
        )


def sampling(values: dict[str, Any], max_tokens: int, context: ModelContext, **more: Any) -> Sampling:
    """The wire's Sampling from fields read by the SAMPLING table; what a dialect does not have keeps its default."""
    values = {name: _given(values.get(name), name, field, context) for name, field in SAMPLING.items()}
    check_ids("stop_token_ids", values["stop_token_ids"], context.vocab_size)
    check_ids("logit_bias", [token for token, _ in values["logit_bias"]], context.vocab_size)
    if values["min_tokens"] > max_tokens:
        raise Unprocessable("`min_tokens` is more than the tokens asked for", param="min_tokens", code="out_of_range")
    values["top_k"] = min(values["top_k"], context.vocab_size)  # a larger one means the same, and need not fit the wire
    return Sampling(max_tokens=max_tokens, **values, **more)


def _given(value: Any, name: str, field: Field, context: ModelContext) -> Any:
    if value is not None:
        return value
    return context.recommended.get(name, field.effective_default)


def recommended(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint's generation_config.json recommends: nothing where it says not to sample.

    A value that no request could have (a `top_k` of 0) asks for nothing.
    """
    if generation.get("do_sample") is False:
        return {}
    found: dict[str, Any] = {}
    for name in RECOMMENDED:
        with suppress(SluiceError):
            if (value := generation.get(name)) is not None:
                found[name] = SAMPLING[name].reader(name, value)
    return found


class Totals:
    """Folds the deltas of all choices into one usage and one set of timings."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
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
        prompt = sum(map(len, self.request.prompts))
        return Usage(prompt, sum(self._completion), sum(self._cached.values()))

    @property
    def timings(self) -> dict[str, float]:
        """Of the slowest choice, in ms; the inter-token times are what this process saw."""
        gaps = sorted(self._gaps) or [0.0]
        worst = {
            part: round(max((getattr(t, part) for t in self._timings), default=0.0), 3)
            for part in ("queue_ms", "prefill_ms", "decode_ms")
        }
        return {
            **worst,
            "cached_tokens": sum(self._cached.values()),
            "inter_token_p50_ms": round(gaps[len(gaps) // 2], 3),
            "inter_token_p99_ms": round(gaps[len(gaps) * 99 // 100], 3),
        }


def openai_error(exc: SluiceError) -> dict[str, Any]:
    return {"message": exc.message, "type": exc.kind, "param": exc.param, "code": exc.code}


def openai_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


to_json = msgspec.json.encode
