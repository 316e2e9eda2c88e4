"""SGLang's /generate: continues texts or token ids."""

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import UNSET

from frontend.api.answer import Answer, AsyncDeltas, ResponseContext
from frontend.api.openai.chunk_writer import LEAST, error
from frontend.api.openai.completions import MOST_TOKENS, tokenized
from frontend.api.request_builder import ParsedRequest, check_repeated, prepare
from frontend.api.sglang import types
from frontend.api.sglang.types import GenerateRequest
from frontend.errors import SluiceError, Unprocessable, api_status
from frontend.model_context import ModelContext, check_model
from frontend.request import Delta, Finish, GenerationRequest, TokenLogprob, Usage
from frontend.schema.base import JsonArray, made, to_json
from frontend.server.sse import SERVER_SENT_EVENTS
from frontend.structured_output import fields as structured_output_fields

# Answers in SGLang's format, and the events of a stream. Each event repeats all of its answer so far.
#
# SGLang's clients expect this repetition. With one event per token, a stream's bytes would grow with the square of
# its length, and one long answer would delay all others. So an event is sent only when the answer has grown by
# 1/GROWTH.

DONE = b"data: [DONE]\n\n"
GROWTH = 128


class _Answer(Answer):
    def __init__(self, context: ResponseContext, index: int) -> None:
        super().__init__(context, index)
        self._asked: GenerateRequest = context.request.format_data
        self._scores: list[TokenLogprob] = []
        self._reported = 0  # number of tokens in the last event

    def add(self, delta: Delta) -> None:
        super().add(delta)
        self._scores += delta.logprobs or ()

    @property
    def entries(self) -> int:
        """How many log-probabilities the whole answer reports."""
        if not self._asked.scored:
            return 0
        prompt = len(self.context.request.prompts[self.prompt]) if self._asked.scored_from is not None else 0
        return (len(self._scores) + prompt) * (1 + self._asked.top)

    def news(self, numbered: bool) -> Iterator[types.SglangAnswer]:
        """Yields the answer so far if it has grown enough since the last event, or has ended."""
        ended = self.last is not None and self.last.finish is not None
        if ended or len(self.ids) - self._reported > self._reported // GROWTH:
            self._reported = len(self.ids)
            yield self.so_far(self.last or Delta(self.index, [], []), numbered)

    def so_far(self, last: Delta, numbered: bool = False) -> types.SglangAnswer:
        index = self.index if numbered else UNSET
        return types.SglangAnswer(text=self.text, output_ids=self.ids, meta_info=self._meta(last), index=index)

    def finished(self) -> types.SglangAnswer:
        """Returns the whole answer. Raises SluiceError if it has not ended."""
        return self.so_far(self.end)

    def _meta(self, last: Delta) -> types.SglangMeta:
        usage = last.usage or Usage(len(self.context.request.prompts[self.prompt]), len(self.ids))
        timings, scores = last.timings if last.finish else None, self._asked.scored
        tops = scores and self._asked.top > 0
        prompt = self._scored_prompt(last) if scores else []
        return types.SglangMeta(
            id=self._id(), finish_reason=self._finish(last, usage), prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens, cached_tokens=usage.cached_tokens,
            weight_version=weight_version(self.context.fingerprint),
            seed=UNSET if last.seed is None else last.seed,
            e2e_latency=UNSET if timings is None else (timings.queue_ms + timings.prefill_ms + timings.decode_ms) / 1e3,
            input_token_logprobs=(
                _encoded(self._scored(one.token_id, one.logprob) for one in prompt) if scores else UNSET
            ),
            output_token_logprobs=(
                [self._scored(one.token_id, one.logprob) for one in self._scores] if scores else UNSET
            ),
            input_top_logprobs=_encoded(self._top(one) or None for one in prompt) if tops else UNSET,
            output_top_logprobs=[self._top(one) for one in self._scores] if tops else UNSET,
        )  # fmt: skip

    def _id(self) -> str:
        rid, several = self._asked.rid, len(self.context.request.prompts) * self.context.request.n > 1
        if isinstance(rid, list):
            return rid[self.prompt] if self.prompt < len(rid) else self.context.id
        return f"{rid or self.context.id}_{self.index}" if several else rid or self.context.id

    def _finish(self, last: Delta, usage: Usage) -> types.SglangFinish | None:
        match last.finish:
            case None:
                return None
            case Finish.LENGTH:
                return types.SglangFinish(type="length", length=usage.completion_tokens)
        return types.SglangFinish(type="stop", matched=UNSET if last.matched_stop is None else last.matched_stop)

    def _scored_prompt(self, last: Delta) -> Iterable[TokenLogprob]:
        if (start := self._asked.scored_from) is None:
            return ()
        return (last.extras.prompt_logprobs or [])[start:]

    def _top(self, token: TokenLogprob) -> list[types.Scored]:
        return [self._scored(id, logprob) for id, logprob in token.top]

    def _scored(self, id: int, logprob: float) -> types.Scored:
        text = self.context.tokenizer.token_text(id) if self._asked.return_text_in_logprobs else None
        return (max(LEAST, logprob) if logprob == logprob else None, id, text)  # a prompt's first token has NaN


def _encoded(values: Iterable[Any]) -> Any:
    """Returns an array that is already encoded, because a prompt's log-probabilities may be a million."""
    array = JsonArray(each=64)
    array.extend(values)
    return array.raw


def weight_version(fingerprint: str) -> str:
    return fingerprint or "default"  # SGLang's version name of weights that were never replaced


class EventWriter:
    """Writes the events of a stream."""

    def __init__(self, context: ResponseContext) -> None:
        self._answers = answers(context)

    def write(self, deltas: list[Delta]) -> bytes:
        for delta in deltas:
            self._answers[delta.index].add(delta)
        changed = [self._answers[index] for index in dict.fromkeys(delta.index for delta in deltas)]
        news = [one for answer in changed for one in answer.news(numbered=len(self._answers) > 1)]
        return b"".join([b"data: " + to_json(one) + b"\n\n" for one in news])

    def end(self) -> bytes:
        return DONE


def answers(context: ResponseContext) -> list[_Answer]:
    return [_Answer(context, index) for index in range(len(context.request.prompts) * context.request.n)]


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """Writes the answer to a single prompt as an object, and several answers as an array."""
    every = answers(context)
    async for deltas in arriving:
        for delta in deltas:
            every[delta.index].add(delta)
    asked: GenerateRequest = context.request.format_data

    def make() -> bytes:
        done = [one.finished() for one in every]
        return to_json(done if asked.several or len(done) > 1 else done[0])

    return await made(make, sum(one.entries for one in every))


__all__ = [
    "FRAMING", "NAME", "PREFIX", "REQUEST", "complete", "error", "parse", "status", "stream_error", "stream_writer",
]  # fmt: skip
NAME, PREFIX = "sglang generate", "gen"
FRAMING = SERVER_SENT_EVENTS
REQUEST = GenerateRequest
status = api_status


async def parse(request: GenerateRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    if request.scored_from is not None and request.stream:
        raise Unprocessable(
            "`logprob_start_len` cannot go with `stream`", param="logprob_start_len", code="conflicting_fields"
        )
    params = request.params
    most = params.max_new_tokens
    if most is None and context.most_new is None:  # the name of a model may have a limit of its own
        most = MOST_TOKENS
    if request.stream and request.scored:
        places = context.most_new or 0 if most is None else most
        check_repeated(request.top, places, "max_new_tokens")
    reading = ParsedRequest(
        fields := request.fields, request.param, most, "sampling_params.max_new_tokens", n=params.n,
        logprobs=request.top if request.scored else None,
        form=structured_output_fields.openai(fields, None, ""), format_data=request,
    )  # fmt: skip
    prompts = await tokenized(request.prompts, context, add_special_tokens=True, param=request.param)
    return await prepare(reading, prompts, context)


def stream_writer(context: ResponseContext) -> EventWriter:
    return EventWriter(context)


def stream_error(exc: SluiceError, request_id: str, context: ResponseContext) -> bytes:
    """Encodes the end of a failed stream: the error, then the same end mark as in other streams."""
    return b"data: " + error(exc, request_id) + b"\n\n" + DONE
