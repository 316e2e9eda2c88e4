"""An admitted request: its choices, polled for what has arrived, until every choice has ended or one has failed.

Knows tokens and text, but no API format and no socket. Each poll returns one list with everything that has
arrived. So if the client reads slowly or the event loop is busy, the lists get longer instead of more numerous.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from frontend.errors import DeadlineExceeded, Internal, Overloaded, SluiceError, Unprocessable
from frontend.request import Delta, Finish, GenerationRequest, Usage
from frontend.text.detokenizer import OutputText
from frontend.workers.pool import WorkerPool
from frontend.workers.stream import Batch, Stream, ignore
from shared.messages import End, Logprobs, Outcome, Timings

# One choice of a request: turns the tokens that its stream has received into Deltas. Never waits.
#
# A batch of tokens becomes text, and the text becomes a Delta. Optional features change the deltas: each feature has
# a function that is called with every delta (extras.py). Knows no other choice.

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
        timings = self.stream.whole(self.stream.started if end is None else end.timings)
        if timings.cached_tokens > sent:  # a worker continued the output of another worker
            timings = msgspec.structs.replace(timings, cached_tokens=sent)
        if end is not None:
            return timings
        return msgspec.structs.replace(timings, decode_ms=1e3 * (self.last_at - self.first_at))


class RequestMetrics:
    """Receives the service's reports about requests, in under a microsecond a call. This base class ignores them."""

    def admitted(self, prompt_tokens: int) -> None: ...
    def first_tokens(self, seconds: float, tokens: int) -> None: ...
    def next_tokens(self, seconds: float, tokens: int) -> None: ...
    def finished(self, finish: Finish, seconds: float) -> None: ...
    def aborted(self, reason: str) -> None: ...


class Generation:
    """An admitted request. Use either `poll()` or `deltas()`, and always call `close()`.

    A stream (frontend/server/sse.py) uses `on_ready` and `poll`, which need no task. `deltas()` awaits
    the same polls. It is for complete responses and the Python API.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        pool: WorkerPool,
        metrics: RequestMetrics,
        live: set["Generation"],
        *,
        arrived_at: float,
        generates: bool = True,
    ) -> None:
        """
        choices: the choice at index `i` belongs to prompt `i // n`
        live: all generations of this process that are not closed; this object adds and removes itself
        arrived_at: when the request's body had been read, by `time.perf_counter()`
        generates: whether tokens are generated; if they are only checked, their speed is not measured
        """
        self.choices = choices
        self._pool = pool
        self._metrics = metrics
        self._live = live
        self._arrived_at = arrived_at
        self._generates = generates
        self.ended = False  # whether the last `poll` returned the last deltas
        self.error: SluiceError | None = None  # why the generation ended without success
        self.reason = ""  # why the generation was closed before every choice had a `finish`
        self._failure: SluiceError | None = None  # the argument of `fail`
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._open = len(choices)  # choices that are not done
        self._scheduled = False  # whether the loop will call `_notify`
        self._callback: Callable[[], None] = ignore
        live.add(self)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the workers that compute the answer; empty if they have none."""
        return self.choices[0].stream.fingerprint

    def fail_after(self, seconds: float) -> None:
        """Fails the request if it has not ended after `seconds`, even if its worker does not respond."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.fail, deadline_error())

    def fail(self, error: SluiceError) -> None:
        """Ends the request with `error`, without waiting for its worker."""
        self._failure = error
        self._pool.abort([choice.stream for choice in self.choices])

    def close(self, reason: str = "client") -> None:
        """Aborts all choices that have not ended, and counts them under `reason`. May be called twice. Never waits."""
        if self not in self._live:
            return
        self._live.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        unfinished = [choice for choice in self.choices if not choice.done]
        if not all([choice.finish for choice in self.choices]):
            self.reason = reason
        self._pool.abort([choice.stream for choice in unfinished])
        for _ in unfinished:
            self._metrics.aborted(reason)

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Calls `callback` in the next turn of the event loop, and again after each arrival."""
        self._callback = callback
        for choice in self.choices:
            choice.stream.on_fresh = self._schedule_notify
        self._schedule_notify()

    def detach(self) -> None:
        """Calls nobody any more.

        Without this, the generation, its streams and its reader would hold one another, with prompts and bodies of
        megabytes, until the garbage collector finds them: after tens of thousands of further objects.
        """
        self._callback = ignore
        for choice in self.choices:
            choice.stream.on_fresh = ignore

    def _schedule_notify(self) -> None:
        """Schedules one `_notify` for the next turn of the loop, no matter how many arrivals there are until then."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._notify)

    def _notify(self) -> None:
        self._scheduled = False
        self._callback()

    def poll(self) -> list[Delta]:
        """Returns all deltas since the last call, perhaps none. After the last delta, sets `ended` and closes itself.

        The generation ends when every choice has a `finish`, or when one has failed. Then `error` says why.
        """
        now = time.perf_counter()
        deltas: list[Delta] = []
        failed: End | None = None
        for choice in self.choices:
            if choice.done or not choice.stream.fresh:
                continue
            batch = choice.stream.gather()
            delta = self._add(choice, batch, now)
            if delta is not None:
                deltas.append(delta)
            if choice.done and choice.finish is None:
                failed = batch.end
        if failed is not None:
            self._end_with(self._failure or error_of(failed), failed)
        elif not self._open:
            self.ended = True
            self.close()
        return deltas

    def _add(self, choice: Choice, batch: Batch, now: float) -> Delta | None:
        if batch.tokens:
            self._measure(choice, len(batch.tokens), now)
        delta = choice.add(batch)
        if choice.done:
            self._open -= 1
            if choice.finish is not None:
                self._finished(choice, batch, now)
        return delta

    def replay(self, index: int, count: int, *, ended: bool) -> Delta | None:
        """Returns the delta for the next `count` tokens of a choice, as `poll` did when another process received them.

        ended: whether the choice's end arrived with them. All of it must have been received.
        """
        choice = self.choices[index]
        if choice.done:
            return None
        return self._add(choice, choice.stream.gather_only(count, ended=ended), time.perf_counter())

    async def deltas(self) -> AsyncGenerator[list[Delta]]:
        """Yields each list of deltas that is not empty.

        Raises:
            SluiceError: a choice failed. Its last deltas have been yielded before.
        """
        ready = asyncio.Event()
        self.on_ready(ready.set)
        try:
            while not self.ended:
                await ready.wait()
                ready.clear()
                if deltas := self.poll():
                    yield deltas
        except GeneratorExit:
            self.close()
            raise
        finally:
            self.detach()
        if self.error is not None:
            raise self.error

    def _end_with(self, error: SluiceError, end: End) -> None:
        self.ended = True
        self.error = error
        reason = error.code or end.outcome.value
        self._metrics.aborted(reason)
        self.close(reason)

    def _measure(self, choice: Choice, tokens: int, now: float) -> None:
        if not choice.last_at:
            choice.first_at = now
            if self._generates:
                self._metrics.first_tokens(now - self._arrived_at, tokens)
        elif self._generates:
            self._metrics.next_tokens(now - choice.last_at, tokens)
        choice.last_at = now

    def _finished(self, choice: Choice, batch: Batch, now: float) -> None:
        if batch.end is None:
            self._pool.abort([choice.stream])
            self._metrics.aborted("stop")
        self._metrics.finished(choice.finish or Finish.STOP, now - self._arrived_at)


def deadline_error(message: str = "") -> DeadlineExceeded:
    return DeadlineExceeded(message or "the request's deadline has passed", code="deadline_exceeded")


def error_of(end: End) -> SluiceError:
    """Returns the error that a client gets for an end without success."""
    match end.outcome:
        case Outcome.DEADLINE:
            return deadline_error(end.error)
        case Outcome.DEAD_END:
            return Unprocessable(f"the answer cannot keep to what was asked for: {end.error}", code="invalid_grammar")
        case Outcome.SHUTDOWN:
            return Overloaded(end.error or "the server is shutting down", code="shutdown", retry_after=1.0)
        case Outcome.ABORTED:
            return Internal(end.error or "the request was aborted by the server", code="aborted")
        case _:
            return Internal(end.error or "the worker failed", code="worker_error")
