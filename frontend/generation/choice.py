"""One choice of a request: turns what its stream has received into Deltas. Knows no other choice; never waits."""

import math

import msgspec

from frontend.request import Delta, Finish, GenerationRequest, TokenLogprob, Usage
from frontend.text.detokenizer import OutputText
from frontend.workers.stream import Batch, Stream
from shared.codec import unpack_f32, unpack_u32
from shared.messages import End, Logprobs, Outcome, Timings

FINISH = {
    Outcome.EOS: Finish.EOS, Outcome.STOP: Finish.STOP, Outcome.LENGTH: Finish.LENGTH, Outcome.POOLED: Finish.POOLED,
    Outcome.CHECKED: Finish.CHECKED,
}  # fmt: skip

LogprobsByOffset = dict[int, TokenLogprob]


class Choice:
    """Turns batches into deltas until it is `done`. `finish` then says how it ended; it is None after a failure."""

    __slots__ = (
        "_before", "_echo", "_index", "_output_logprobs", "_prompt", "_prompt_logprobs", "_released", "_request",
        "_scores", "_text", "done", "finish", "first_at", "last_at", "stream",
    )  # fmt: skip

    def __init__(self, index: int, request: GenerationRequest, stream: Stream, text: OutputText) -> None:
        self.stream = stream
        self.done = False
        self.finish: Finish | None = None
        self.first_at = 0.0  # when its first tokens arrived, in seconds
        self.last_at = 0.0  # when its last tokens arrived; 0 before the first
        self._index = index
        self._request = request
        self._prompt = request.prompts[index // request.n]
        self._text = text
        self._released = 0  # ids in deltas so far
        self._output_logprobs: LogprobsByOffset = {}
        self._prompt_logprobs: LogprobsByOffset = {}
        self._scores: list[Logprobs] = []
        self._echo: tuple[list[int], list[str]] | None = None
        self._before: list[str] = []  # of the tokens that the output goes on from: their texts, not in a delta yet
        if request.continued:
            ids, self._before, _ = text.push(list(request.continued))
            self._released = len(ids)

    @property
    def consumed(self) -> int:
        """How many output tokens there are, up to the one that completed a stop string."""
        return max(0, self._text.consumed - len(self._request.continued))

    def echo(self, text: OutputText) -> None:
        """Puts the prompt before the output, as the client wrote it."""
        ids, texts, _ = text.finish(self._prompt)
        exact = self._request.echo[self._index // self._request.n]
        if exact and "".join(texts) != exact:  # a tokenizer that does not round-trip
            texts = [exact, *[""] * (len(ids) - 1)]
        self._echo = ids, texts

    def add(self, batch: Batch) -> Delta | None:
        """Returns the delta that the batch makes certain; None if there is none yet."""
        if self._request.scored_from:
            self._scores += batch.logprobs
        else:
            for logprobs in batch.logprobs:
                self._store(logprobs, self._prompt_logprobs if logprobs.prompt else self._output_logprobs)
        end = batch.end
        if not batch.tokens and end is None:
            return None
        ids, texts, stop_string = self._text.push(batch.tokens) if end is None else self._text.finish(batch.tokens)
        if self._released < len(self._request.continued):
            ids, texts = self._new(ids, texts)
        stop: str | int | None = stop_string
        if stop_string is not None:
            self.finish = Finish.STOP
        elif end is not None:
            self.finish = FINISH.get(end.outcome)
            stop = self._stop_id(end)
        self.done = end is not None or self.finish is not None
        return self._delta(ids, texts, stop, end)

    def _new(self, ids: list[int], texts: list[str]) -> tuple[list[int], list[str]]:
        """Returns what is new: without the tokens that the output goes on from, whose texts were held back so far."""
        old = min(len(ids), len(self._request.continued) - self._released)
        self._released += old
        self._before = [*self._before, *texts[:old]]
        return ids[old:], texts[old:]

    def _stop_id(self, end: End) -> int | None:
        return self.stream.output[-1] if end.outcome is Outcome.STOP and self.stream.output else None

    def _delta(self, ids: list[int], texts: list[str], stop: str | int | None, end: End | None) -> Delta | None:
        logprobs: list[TokenLogprob] | None = None
        if self._request.sampling.logprobs is not None:
            logprobs = self._take_logprobs(self._output_logprobs, ids, self._released)
        self._released += len(ids)
        if self._echo is not None:
            prompt, pieces = self._echo
            self._echo = None
            logprobs = (
                None if logprobs is None else self._prompt_scores(prompt, self._request.sampling.logprobs) + logprobs
            )
            ids, texts = prompt + ids, pieces + texts
        if self.finish is not None:
            return self._last(Delta(self._index, ids, texts, self.finish, stop, logprobs=logprobs), end)
        if not ids and not texts:
            return None
        usage = self._usage() if self._request.continuous_usage else None
        return self._after(Delta(self._index, ids, texts, usage=usage, logprobs=logprobs))

    def _after(self, delta: Delta) -> Delta:
        """Returns the delta with the texts that come before it, if no delta had them yet."""
        delta.before, self._before = self._before, []
        return delta

    def _usage(self, cached_tokens: int = 0) -> Usage:
        continued = len(self._request.continued)
        return Usage(len(self._prompt) + continued, self.consumed, cached_tokens, continued)

    def _last(self, delta: Delta, end: End | None) -> Delta:
        timings = self.timings(end)
        delta.usage = self._usage(timings.cached_tokens)
        delta.timings = timings
        delta.seed = self.stream.seed
        delta.vector, delta.scores = self.stream.vector, self._scores
        if self._request.receipt:
            delta.output = self.stream.output[: self._text.consumed]
        if self._request.prompt_logprobs is not None:
            delta.prompt_logprobs = self._prompt_scores(self._prompt, self._request.prompt_logprobs)
        return self._after(delta)

    def _prompt_scores(self, prompt: list[int], most: int | None) -> list[TokenLogprob]:
        """Returns the prompt's log-probabilities, with `most` of the likeliest tokens each."""
        scores = self._prompt_logprobs
        every = self._take_logprobs(dict(scores), prompt, 0)
        return [TokenLogprob(one.token_id, one.logprob, one.top[:most], one.rank) for one in every]

    def timings(self, end: End | None) -> Timings:
        """Returns the worker's timings.

        end: None if a stop string ended the choice; its timings then count from its first token
        """
        sent = len(self._prompt) + len(self._request.continued)
        timings = self.stream.started if end is None else end.timings
        if timings.cached_tokens > sent:  # a worker went on from output of another one
            timings = msgspec.structs.replace(timings, cached_tokens=sent)
        if end is not None:
            return timings
        return msgspec.structs.replace(timings, decode_ms=1e3 * (self.last_at - self.first_at))

    def _store(self, logprobs: Logprobs, into: LogprobsByOffset) -> None:
        chosen, ranks = unpack_f32(logprobs.chosen), unpack_u32(logprobs.ranks)
        ids, values, k = unpack_u32(logprobs.top_ids), unpack_f32(logprobs.top_logprobs), logprobs.top
        for i, logprob in enumerate(chosen):
            top = tuple(zip(ids[i * k : i * k + k], values[i * k : i * k + k], strict=True))
            into[logprobs.start + i] = TokenLogprob(-1, logprob, top, ranks[i] if ranks else 0)

    def _take_logprobs(self, logprobs: LogprobsByOffset, ids: list[int], start: int) -> list[TokenLogprob]:
        """Removes and returns one log-probability per id: NaN for a token that was never scored (a prompt's first)."""
        taken = [logprobs.pop(start + i, None) for i in range(len(ids))]
        return [
            TokenLogprob(id, math.nan) if entry is None else TokenLogprob(id, entry.logprob, entry.top, entry.rank)
            for id, entry in zip(ids, taken, strict=True)
        ]
