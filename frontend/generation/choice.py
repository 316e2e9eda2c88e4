"""One choice of a request: turns the tokens that its stream has received into Deltas. Never waits.

A batch of tokens becomes text, and the text becomes a Delta. Optional features change the deltas: each feature has a
function that is called with every delta (extras.py). Knows no other choice.
"""

from collections.abc import Callable, Sequence

import msgspec

from frontend.request import Delta, Finish, GenerationRequest, Usage
from frontend.text.detokenizer import OutputText
from frontend.workers.stream import Batch, Stream
from shared.messages import End, Logprobs, Outcome, Timings

FINISH = {
    Outcome.EOS: Finish.EOS, Outcome.STOP: Finish.STOP, Outcome.LENGTH: Finish.LENGTH, Outcome.POOLED: Finish.POOLED,
    Outcome.CHECKED: Finish.CHECKED,
}  # fmt: skip

Extra = Callable[["Choice", Delta], None]  # may change the delta, which is dropped if it is empty afterwards


class Choice:
    """Turns batches into deltas until `done`. Then `finish` says how the choice ended; None after a failure."""

    __slots__ = (
        "_brought", "_extras", "_index", "done", "finish", "first_at", "last_at", "logprobs", "prompt", "stream",
        "text",
    )  # fmt: skip

    def __init__(
        self, index: int, request: GenerationRequest, stream: Stream, text: OutputText, extras: Sequence[Extra] = ()
    ) -> None:
        """extras: called in this order with each delta, even an empty one; a delta that stays empty is dropped"""
        self.stream = stream
        self.done = False
        self.finish: Finish | None = None
        self.first_at = 0.0  # when the first tokens arrived, in seconds
        self.last_at = 0.0  # when the last tokens arrived; 0 before the first
        self.prompt = request.prompts[index // request.n]
        self.text = text
        self.logprobs: list[Logprobs] = []  # log-probabilities that no extra has taken yet
        self._brought = request.brought
        self._extras = extras
        self._index = index

    @property
    def consumed(self) -> int:
        """The number of output tokens so far; a stop string ends the count with the token that completes it."""
        return max(0, self.text.consumed - self._brought)

    def add(self, batch: Batch) -> Delta | None:
        """Returns the delta for a batch. None if the batch adds no text or ids that can be sent yet."""
        end = batch.end
        if batch.logprobs:
            self.logprobs += batch.logprobs
        if not batch.tokens and end is None:
            return None
        ids, texts, stop = self.text.push(batch.tokens) if end is None else self.text.finish(batch.tokens)
        delta = Delta(self._index, ids, texts)
        if stop is not None:
            delta.finish, delta.stop = Finish.STOP, stop
        elif end is not None:
            delta.finish, delta.stop = FINISH.get(end.outcome), self._stop_id(end)
        for extra in self._extras:
            extra(self, delta)
        self.finish = delta.finish
        self.done = end is not None or self.finish is not None
        if self.finish is not None:
            self._complete(delta, end)
        elif not delta.ids and not delta.texts:
            return None
        return delta

    def _stop_id(self, end: End) -> int | None:
        return self.stream.output[-1] if end.outcome is Outcome.STOP and self.stream.output else None

    def _complete(self, delta: Delta, end: End | None) -> None:
        delta.timings = self.timings(end)
        delta.usage = self.usage(delta.timings.cached_tokens)
        delta.seed = self.stream.seed
        delta.matched_stop = next(reversed(self.stream.output), None) if delta.finish is Finish.EOS else delta.stop

    def usage(self, cached_tokens: int = 0) -> Usage:
        """Returns the usage so far."""
        return Usage(len(self.prompt) + self._brought, self.consumed, cached_tokens, self._brought)

    def timings(self, end: End | None) -> Timings:
        """Returns the worker's timings.

        end: None while the choice runs, or if a stop string ended it; this process then measures the decoding time
        """
        sent = len(self.prompt) + self._brought
        timings = self.stream.started if end is None else end.timings
        if timings.cached_tokens > sent:  # a worker continued the output of another worker
            timings = msgspec.structs.replace(timings, cached_tokens=sent)
        if end is not None:
            return timings
        return msgspec.structs.replace(timings, decode_ms=1e3 * (self.last_at - self.first_at))
