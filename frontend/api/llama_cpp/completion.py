"""llama.cpp's /completion: continues texts, and reports statistics about each answer. /infill answers in the same form.

Each answer's last event of a stream has `"stop": true`.
"""

import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.api.answer import Answer, AsyncDeltas, ResponseContext
from frontend.api.formats import Format
from frontend.api.llama_cpp import types
from frontend.api.llama_cpp.options import (
    PROMPT_SCHEMA,
    AnyPrompt,
    Options,
    Prompt,
    Wanted,
    options_request,
    several,
    tokenized,
)
from frontend.api.llama_cpp.types import told
from frontend.api.receipts import receipt_of
from frontend.api.telemetry import LlamaCppProgress, LlamaCppTimings, timings
from frontend.chat.samplers import BREAKERS, PLAIN
from frontend.errors import ContextLengthExceeded, NotSupported, SluiceError, api_status
from frontend.model_context import ModelContext, check_characters, check_ids, check_model
from frontend.request import Delta, Finish, GenerationRequest, TokenLogprob, Usage
from frontend.schema.base import Names, RequestModel, made, to_json
from frontend.schema.request_fields import doc, order_of
from frontend.server.sse import SERVER_SENT_EVENTS
from frontend.text.fill_in_middle import Layout, filled, layout_of, repository_marks
from shared.messages import Sampling, Timings, WindowPenalties

CHAIN = (  # fields of SamplerChain that have the same names in llama.cpp
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "typical_p", "xtc_probability",
    "xtc_threshold", "min_keep", "mirostat", "mirostat_tau", "mirostat_eta",
)  # fmt: skip
STOP_TYPES: dict[Finish, types.StopType] = {Finish.EOS: "eos", Finish.LENGTH: "limit"}


class LlamaCppCompletionRequest(Options):
    prompt: Annotated[
        AnyPrompt,
        Meta(description="A text, token ids, a mixture of both, or several of these", extra_json_schema=PROMPT_SCHEMA),
    ]

    def __post_init__(self) -> None:
        super().__post_init__()
        several(self.prompt, "prompt")


async def _parse_completion(request: LlamaCppCompletionRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    prompts = await tokenized(several(request.prompt, "prompt"), "prompt", context)
    return await options_request(request, prompts, "prompt", context)


class _Answer(Answer):
    def __init__(self, context: ResponseContext, index: int) -> None:
        super().__init__(context, index)
        self._wanted: Wanted = context.request.format_data
        self._scores: list[TokenLogprob] = []
        self._timings = Timings()
        self.has_break = False

    @property
    def options(self) -> Options:
        return self._wanted.options

    @property
    def entries(self) -> int:
        """How many probabilities the whole answer reports."""
        return len(self._scores) * (1 + self.options.probs)

    @property
    def evaluated(self) -> int:
        return len(self.context.request.prompts[self.prompt])

    def add(self, delta: Delta) -> None:
        """Adds a delta. Keeps its text and ids only if the response is not a stream."""
        self._timings = delta.timings or self._timings
        self.has_break = self.has_break or any("\n" in text for text in delta.texts)
        if self.context.request.stream:
            self.last = delta
        else:
            super().add(delta)
            self._scores += delta.logprobs or ()

    def progress(self) -> LlamaCppProgress:
        return LlamaCppProgress(
            total=self.evaluated, cache=self._timings.cached_tokens, processed=self.evaluated,
            time_ms=self._timings.prefill_ms,
        )  # fmt: skip

    def timings(self, predicted: int, decode_ms: float) -> LlamaCppTimings:
        cached = self._timings.cached_tokens
        return timings(cached, self.evaluated - cached, self._timings.prefill_ms, predicted, decode_ms)

    def probabilities(self, scores: list[TokenLogprob]) -> list[types.LlamaCppProbability] | UnsetType:
        options = self.options
        if not options.probs:
            return UNSET
        sampling = self.context.request.sampling
        return told(scores, options.probs, options.post_sampling_probs, sampling, self.context.tokenizer)

    def finished(self) -> Any:
        """Returns the whole answer, or the last event of a stream. Raises SluiceError if the answer has not ended."""
        last = self.end
        request, wanted, usage = self.context.request, self._wanted, last.usage or Usage(0, 0)
        word = last.stop if isinstance(last.stop, str) else ""
        full = usage.completion_tokens >= request.sampling.max_tokens and wanted.to_the_end
        whole = types.LlamaCppCompletion(
            index=self.index,
            content=self.text,
            tokens=self.ids if self.options.return_tokens else [],
            model=request.model,
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=self.evaluated,
            generation_settings=settings(request.sampling, wanted, last.seed, request.stops),
            prompt=wanted.prompts[self.prompt],
            has_new_line=self.has_break,
            truncated=last.finish is Finish.LENGTH and full,
            stop_type="word" if word else STOP_TYPES.get(self.finish, "eos"),
            stopping_word=word,
            tokens_cached=usage.cached_tokens,
            timings=self.timings(usage.completion_tokens, self._timings.decode_ms),
            completion_probabilities=UNSET if request.stream else self.probabilities(self._scores),
            receipt=receipt_of(self.context, last),
        )
        return _selected(whole, self.options.response_fields) if self.options.response_fields else whole


def settings(sampling: Sampling, wanted: Wanted, seed: int | None, stops: tuple[str, ...]) -> types.LlamaCppSettings:
    """Returns the settings with which an answer is generated. seed: the answer's seed; None: not drawn yet"""
    options = wanted.options
    biases = [types.LlamaCppBias(token=id, bias=bias) for id, bias in sampling.logit_bias]
    biases += [types.LlamaCppBias(token=id, bias=None) for id in wanted.forbidden]
    limit = options.limit if options.limit < 0 else sampling.max_tokens
    return types.LlamaCppSettings(
        n_ctx=wanted.n_ctx, seed=-1 if seed is None else seed, **_samplers(sampling, options), stop=list(stops),
        max_tokens=limit, n_predict=limit, ignore_eos=options.ignore_eos, stream=options.stream, logit_bias=biases,
        dry_sequence_breakers=list(options.dry_sequence_breakers or BREAKERS),
        n_probs=options.probs, grammar=wanted.grammar,
        timings_per_token=options.timings_per_token, post_sampling_probs=options.post_sampling_probs,
    )  # fmt: skip


def _samplers(sampling: Sampling, options: Options) -> dict[str, Any]:
    """Returns the sampling parameters of an answer under llama.cpp's names."""
    chain = sampling.chain
    if chain is None:
        return {
            "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
            "min_p": sampling.min_p, "repeat_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty,
            "samplers": [name for name in order_of(options.samplers or PLAIN) if name in PLAIN],
        }  # fmt: skip
    plain = WindowPenalties(-1, sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    penalties, dry = chain.penalties or plain, chain.dry
    settings = {name: getattr(chain, name) for name in CHAIN} | {"top_n_sigma": chain.top_n_sigma or -1.0}
    if dry is not None:
        settings |= {
            "dry_multiplier": dry.multiplier, "dry_base": dry.base, "dry_allowed_length": dry.allowed_length,
            "dry_penalty_last_n": dry.last_n,
        }  # fmt: skip
    return settings | {
        "repeat_last_n": penalties.last_n, "repeat_penalty": penalties.repetition,
        "presence_penalty": penalties.presence, "frequency_penalty": penalties.frequency,
        "samplers": ["penalties"] * (chain.penalties is None and sampling.penalized) + list(chain.order),
    }  # fmt: skip


def _selected(whole: types.LlamaCppCompletion, fields: list[str]) -> dict[str, Any]:
    """Returns the fields at these paths, such as `generation_settings/n_predict`. Unknown paths are ignored."""
    found: dict[str, Any] = {}
    plain = msgspec.to_builtins(whole)
    for path in fields:
        value: Any = plain
        for name in path.split("/"):
            value = value.get(name, UNSET) if isinstance(value, dict) else UNSET
        if value is not UNSET:
            found[path] = value
    return found


class EventWriter:
    """Writes one response as a stream of events."""

    def __init__(self, context: ResponseContext) -> None:
        self._answers = answers(context)
        self._decoding = [0.0] * len(self._answers)  # when each answer's first tokens arrived; 0: not yet
        self._counts = [0] * len(self._answers)
        self._now = 0.0  # when the current deltas arrived

    def write(self, deltas: list[Delta]) -> bytes:
        return b"".join([_event(one) for delta in deltas for one in self._objects(delta)])

    def end(self) -> bytes:
        return b""

    def _objects(self, delta: Delta) -> list[Any]:
        answer = self._answers[delta.index]
        first = not self._counts[delta.index]
        self._now = time.perf_counter()
        answer.add(delta)
        objects: list[Any] = []
        if first and answer.options.return_progress:
            objects.append(self._part(answer, delta.index, "", [], prompt_progress=answer.progress()))
        if delta.ids:
            self._decoding[delta.index] = self._decoding[delta.index] or self._now
            objects += self._parts(answer, delta)
        return objects if delta.finish is None else [*objects, answer.finished()]

    def _parts(self, answer: _Answer, delta: Delta) -> list[types.LlamaCppPart]:
        """Returns one event per token if probabilities are reported, and else one event for the whole delta."""
        if not answer.options.probs:
            self._counts[delta.index] += len(delta.ids)
            return [self._part(answer, delta.index, delta.text, delta.ids)]
        parts = []
        for id, text, score in zip(delta.ids, delta.texts, delta.logprobs or (), strict=False):
            self._counts[delta.index] += 1
            scores = answer.probabilities([score])
            parts.append(self._part(answer, delta.index, text, [id], completion_probabilities=scores))
        return parts

    def _part(self, answer: _Answer, index: int, text: str, ids: list[int], **more: Any) -> types.LlamaCppPart:
        if answer.options.timings_per_token:
            since = self._now - self._decoding[index] if self._decoding[index] else 0.0
            more["timings"] = answer.timings(self._counts[index], 1e3 * since)
        return types.LlamaCppPart(
            index=index, content=text, tokens=ids, tokens_predicted=self._counts[index],
            tokens_evaluated=answer.evaluated, **more,
        )  # fmt: skip


def answers(context: ResponseContext) -> list[_Answer]:
    return [_Answer(context, index) for index in range(len(context.request.prompts) * context.request.n)]


def _event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def stream_writer(context: ResponseContext) -> EventWriter:
    return EventWriter(context)


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """Returns the response of a request that does not stream: an object for one answer, an array for several."""
    every = answers(context)
    async for deltas in arriving:
        for delta in deltas:
            every[delta.index].add(delta)

    def make() -> bytes:
        done = [one.finished() for one in every]
        return to_json(done[0] if len(done) == 1 else done)

    return await made(make, sum(one.entries for one in every))


# Errors in llama.cpp's format: an object with the HTTP status as `code`, a message and a type.

TYPES: Mapping[str, str] = {"overloaded_error": "unavailable_error", "internal_error": "server_error"}
status = api_status


def error(exc: SluiceError, request_id: str) -> bytes:
    return to_json(types.LlamaCppError(error=_body(exc)))


def stream_error(exc: SluiceError, request_id: str, context: ResponseContext) -> bytes:
    """Encodes the event that ends a failed stream. No event with `"stop": true` follows."""
    return b"data: " + error(exc, request_id) + b"\n\n"


def _body(exc: SluiceError) -> types.LlamaCppErrorBody:
    if isinstance(exc, ContextLengthExceeded):
        asked = f"at least {exc.prompt}" if exc.at_least else f"{exc.prompt}"
        beyond = f" and asks for {exc.output}" if exc.output and exc.prompt < exc.limit else ""
        return types.LlamaCppErrorBody(
            code=status(exc),
            message=f"the request exceeds the available context size: it has {asked} tokens{beyond}, and there are "
            f"{exc.limit}",
            type="exceed_context_size_error",
            param=exc.param or UNSET,
            n_prompt_tokens=exc.prompt,
            n_ctx=exc.limit,
        )
    kind = TYPES.get(exc.kind, exc.kind)
    return types.LlamaCppErrorBody(code=status(exc), message=exc.message, type=kind, param=exc.param or UNSET)


COMPLETION = Format(
    "llama.cpp completion",
    "cmpl",
    SERVER_SENT_EVENTS,
    LlamaCppCompletionRequest,
    _parse_completion,
    stream_writer,
    complete,
    status,
    error,
    stream_error,
)


# llama.cpp's /infill: generates the text between two parts of a file, for models trained to fill in the middle.
#
# The texts of a request are plain text: the spelling of a special token in them does not become that token.

MAX_FILES = 1024
RESERVED = 256  # tokens of the context that `input_extra` leaves free for an answer without a limit
REPOSITORY, FILE = "myproject\n", "filename\n"  # llama.cpp's default names; no request field sets them


class ExtraFile(RequestModel):
    # `time`: when llama.vim read the file
    IGNORED: ClassVar[Names] = ("time",)

    text: str
    filename: str | None = None


class InfillRequest(Options):
    input_prefix: Annotated[str, doc("What stands before the cursor")]
    input_suffix: Annotated[str, doc("What stands after the cursor")]
    prompt: Annotated[str, doc("How the answer begins")] = ""
    input_extra: Annotated[
        Annotated[list[ExtraFile], Meta(max_length=MAX_FILES)] | None,
        doc("Other files, which stand before; the first parts are left out if not all fits"),
    ] = None


async def _parse_infill(request: InfillRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest. Raises NotSupported, BadRequest or Unprocessable."""
    check_model(request.model, context)
    layout = layout_of(context.tokenizer)
    if layout is None:
        raise NotSupported(
            "this model cannot fill in the middle: its tokenizer has no tokens for it", code="unsupported_route"
        )
    ids = await _infill_prompt(request, layout, context)
    prompt = Prompt(ids, context.tokenizer.decode(ids, skip_special=False))
    return await options_request(request, [prompt], "input_prefix", context)


async def _infill_prompt(request: InfillRequest, layout: Layout, context: ModelContext) -> list[int]:
    for field in ("input_prefix", "input_suffix", "prompt"):
        check_characters(field, getattr(request, field), context)
    tokenizer = context.tokenizer
    files = request.input_extra or []
    texts = [text for file in files for text in (f"{file.filename or 'tmp'}\n", file.text)]
    before, after, begun, name, here, *others = await tokenizer.encode_plain(
        [request.input_prefix, request.input_suffix, request.prompt, REPOSITORY, FILE, *texts], False
    )
    (lead,) = await tokenizer.encode_batch([""])
    asked = [*filled(layout, before, after, tokenizer), *begun]
    extra: list[int] = []
    if marks := repository_marks(tokenizer):
        repository, file = marks
        for title, content in zip(others[::2], others[1::2], strict=True):
            extra += [file, *title, *content]
        extra, begin = [*extra, file, *here], [*lead, repository, *name]
    else:
        extra, begin = [id for content in others[1::2] for id in content], lead
    room = context.max_seq_len - len(begin) - len(asked) - (request.limit if request.limit > 0 else RESERVED)
    kept = extra[-room:] if room > 0 else []
    ids = [*begin, *kept, *asked]
    check_ids("input_prefix", ids, context.vocab_size)
    return ids


INFILL = Format(
    "llama.cpp infill",
    "infill",
    SERVER_SENT_EVENTS,
    InfillRequest,
    _parse_infill,
    stream_writer,
    complete,
    status,
    error,
    stream_error,
)
