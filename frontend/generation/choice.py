"""One choice of an answer: what its stream brings becomes Deltas. Knows no other choice, and waits for nothing."""

import math

import msgspec

from frontend.request import Delta, Finish, GenerationRequest, TokenLogprob, Usage
from frontend.text.detokenizer import OutputText
from frontend.workers.stream import Batch, Stream
from shared.codec import unpack_f32, unpack_u32
from shared.messages import End, Logprobs, Outcome, Timings

FINISH = {Outcome.EOS: Finish.EOS, Outcome.STOP: Finish.STOP, Outcome.LENGTH: Finish.LENGTH}

Scores = dict[int, TokenLogprob]  # by offset


class Choice:
    """Takes batches and gives deltas until `done`; then `finish` says how, or is None after a failure."""

    __slots__ = (
        "_echo",
        "_index",
        "_out",
        "_prompt",
        "_prompt_scores",
        "_released",
        "_request",
        "_text",
        "done",
        "finish",
        "first_at",
        "last_at",
        "stream",
    )  # fmt: skip

    def __init__(self, index: int, request: GenerationRequest, stream: Stream, text: OutputText) -> None:
        self.stream = stream
        self.done = False
        self.finish: Finish | None = None
        self.first_at = 0.0  # when its first tokens came, in seconds
        self.last_at = 0.0  # when its last tokens came, 0 before the first
        self._index = index
        self._request = request
        self._prompt = request.prompts[index // request.n]
        self._text = text
        self._released = 0  # ids handed on
        self._out: Scores = {}
        self._prompt_scores: Scores = {}
        self._echo: tuple[list[int], list[str]] | None = None

    @property
    def consumed(self) -> int:
        """Output tokens up to and including the one that completed a stop."""
        return self._text.consumed

    def echo(self, text: OutputText) -> None:
        """Puts the prompt before the output, as the client wrote it."""
        ids, texts, _ = text.finish(self._prompt)
        exact = self._request.echo[self._index // self._request.n]
        if exact and "".join(texts) != exact:  # a tokenizer that does not give back what it was given
            texts = [exact, *[""] * (len(ids) - 1)]
        self._echo = ids, texts

    def take(self, batch: Batch) -> Delta | None:
        """None when nothing became certain."""
        for logprobs in batch.logprobs:
            self._keep(logprobs, self._prompt_scores if logprobs.prompt else self._out)
        end = batch.end
        if not batch.tokens and end is None:
            return None
        ids, texts, found = self._text.push(batch.tokens) if end is None else self._text.finish(batch.tokens)
        stop: str | int | None = found
        if found is not None:
            self.finish = Finish.STOP
        elif end is not None:
            self.finish = FINISH.get(end.outcome)
            stop = self._stop_id(end)
        self.done = end is not None or self.finish is not None
        return self._delta(ids, texts, stop, end)

    def _stop_id(self, end: End) -> int | None:
        return self.stream.output[-1] if end.outcome is Outcome.STOP and self.stream.output else None

    def _delta(self, ids: list[int], texts: list[str], stop: str | int | None, end: End | None) -> Delta | None:
        scores = None if self._request.sampling.logprobs is None else self._scores(self._out, ids, self._released)
        self._released += len(ids)
        if self._echo is not None:
            prompt, pieces = self._echo
            self._echo = None
            scores = None if scores is None else self._scores(self._prompt_scores, prompt, 0) + scores
            ids, texts = prompt + ids, pieces + texts
        if self.finish is not None:
            return self._last(Delta(self._index, ids, texts, self.finish, stop, logprobs=scores), end)
        if not ids and not texts:
            return None
        usage = Usage(len(self._prompt), self._text.consumed) if self._request.continuous_usage else None
        return Delta(self._index, ids, texts, usage=usage, logprobs=scores)

    def _last(self, delta: Delta, end: End | None) -> Delta:
        timings = self.timings(end)
        delta.usage = Usage(len(self._prompt), self._text.consumed, timings.cached_tokens)
        delta.timings = timings
        delta.seed = self.stream.seed
        return delta

    def timings(self, end: End | None) -> Timings:
        """The worker's, from its `end`; None where a stop string ended the choice: then from its first token."""
        if end is not None:
            return end.timings
        return msgspec.structs.replace(self.stream.started, decode_ms=1e3 * (self.last_at - self.first_at))

    def _keep(self, logprobs: Logprobs, into: Scores) -> None:
        chosen = unpack_f32(logprobs.chosen)
        ids, values, k = unpack_u32(logprobs.top_ids), unpack_f32(logprobs.top_logprobs), logprobs.top
        for i, logprob in enumerate(chosen):
            top = tuple(zip(ids[i * k : i * k + k], values[i * k : i * k + k], strict=True))
            into[logprobs.start + i] = TokenLogprob(-1, logprob, top)

    def _scores(self, scores: Scores, ids: list[int], start: int) -> list[TokenLogprob]:
        """One per id; what was never scored (a prompt's first token) is NaN."""
        found = [scores.pop(start + i, None) for i in range(len(ids))]
        return [
            TokenLogprob(id, math.nan) if score is None else TokenLogprob(id, score.logprob, score.top)
            for id, score in zip(ids, found, strict=True)
        ]
