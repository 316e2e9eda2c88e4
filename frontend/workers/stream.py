"""The output of one sequence as it arrives at a frontend: in order, without gaps, ending once.

The length of `output` is the offset expected next. Every run of tokens names its start, so
    start == length   the run continues the output
    start <  length   the run is a duplicate, or overlaps; what is already here is dropped
    start >  length   tokens are missing: the run is ignored, and the connection requests the output again
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from shared import messages as m
from shared.wire import pack_u32, unpack_u32

RESYNC_INTERVAL_S = 0.25  # a stream requests missing output at most once in this time


def ignore() -> None:
    """Does nothing: the callback of a stream without a listener."""


class Batch(msgspec.Struct, gc=False):
    """Everything a stream received since the last `gather`."""

    tokens: list[int]
    start: int  # output offset of tokens[0]
    logprobs: list[m.Logprobs]
    end: m.End | None


@dataclass(slots=True, eq=False)
class Stream:
    """The output of one sequence. Ends with exactly one `End`."""

    submit: m.Submit
    admission: asyncio.Future[int]
    seed: int = 0
    fingerprint: str = ""  # what its worker's fingerprint must be; "": any, until a worker has admitted the stream
    output: list[int] = field(default_factory=list)  # tokens in the Submit and all received ones; a resubmit sends them
    started: m.Timings = field(default_factory=m.Timings)  # the worker's timings up to the first token
    end: m.End | None = None
    prefilled: m.Timings | None = None  # of the worker that has computed the prompt, if that was another one
    vector: bytes = b""  # the pooled vector (packed float32) if the Submit has `pooling`; arrives with the end
    deaths: set[tuple[str, int]] = field(default_factory=set)  # workers (address, epoch) lost since the last token
    submitted_at: float = field(default_factory=time.monotonic)
    acknowledged: bool = False  # whether the current worker has admitted the stream
    fresh: bool = False  # whether something has arrived since the last `gather`
    on_fresh: Callable[[], None] = ignore  # called whenever something arrives
    gathered: int = 0  # output offset of the first token that the next `gather` returns
    _output_at_death: int = -1  # length of the output at the latest death
    _logprobs: list[m.Logprobs] = field(default_factory=list)
    _next_logprob: list[int] = field(init=False)  # offsets of the next log-probabilities: in the output, in the prompt
    _resynced_at: float = 0.0

    def __post_init__(self) -> None:
        brought = unpack_u32(self.submit.generated).tolist()
        self.output = brought or self.output
        self.gathered = len(brought)
        self._next_logprob = [self.gathered, max(1, self.submit.scored_from)]

    @property
    def id(self) -> int:
        """The id of the stream's latest Submit: a stream gets a new id each time it is sent to a worker."""
        return self.submit.id

    def admitted(self, seed: int, fingerprint: str) -> None:
        """Records that a worker with this fingerprint has admitted the stream and computes with this seed."""
        self.acknowledged = True
        if not self.admission.done():
            self.seed, self.fingerprint = seed, fingerprint
            self.admission.set_result(seed)

    def resubmit(self, id: int) -> None:
        """Replaces `submit` by a message that continues after the received output, under a new id.

        A prompt that another worker should have computed is computed by the worker that gets this message.
        """
        sampling, now = self.submit.sampling, time.monotonic()
        prefill = m.Prefill.HERE if self.submit.prefill is m.Prefill.ONLY else self.submit.prefill
        if self.admission.done():
            sampling = msgspec.structs.replace(sampling, seed=self.seed)
        self.submit = msgspec.structs.replace(
            self.submit, id=id, sampling=sampling, generated=pack_u32(self.output), crashes=len(self.deaths),
            deadline_ms=self._remaining_ms(now), original_id=self.submit.original_id or self.submit.id, prefill=prefill,
        )  # fmt: skip
        self.submitted_at, self.acknowledged = now, False

    def prefill_done(self, timings: m.Timings) -> None:
        """Notes that a worker has computed the prompt for another one, which gets the next Submit."""
        self.prefilled = timings
        self.submit = msgspec.structs.replace(self.submit, prefill=m.Prefill.DONE)

    def whole(self, timings: m.Timings) -> m.Timings:
        """Returns the timings of the request, from those of the worker that generates.

        What was cached is what the worker that computed the prompt found: its pages were computed for this request.
        """
        if self.prefilled is None:
            return timings
        return msgspec.structs.replace(
            timings, cached_tokens=self.prefilled.cached_tokens, queue_ms=self.prefilled.queue_ms + timings.queue_ms,
            prefill_ms=self.prefilled.prefill_ms + timings.prefill_ms,
        )  # fmt: skip

    def _remaining_ms(self, now: float) -> int:
        """Returns the milliseconds left until the deadline, at least 1; 0 if there is no deadline."""
        deadline = self.submit.deadline_ms
        return max(1, deadline - int(1e3 * (now - self.submitted_at))) if deadline else 0

    def gather(self) -> Batch:
        """Returns everything received since the last call; empty unless `fresh`."""
        self.fresh = False
        start, self.gathered = self.gathered, len(self.output)
        logprobs = self._logprobs
        if logprobs:
            self._logprobs = []
        return Batch(self.output[start:], start, logprobs, self.end)

    def rewind(self, length: int) -> None:
        """Makes the next `gather` begin at output offset `length`: the tokens after it were sent with the Submit."""
        self.gathered, self.fresh = length, True

    def gather_only(self, count: int, *, ended: bool) -> Batch:
        """Does the same as `gather`, but returns only the next `count` tokens, and the end only if `ended`."""
        start, self.gathered = self.gathered, self.gathered + count
        logprobs, self._logprobs = self._logprobs, []
        return Batch(self.output[start : self.gathered], start, logprobs, self.end if ended else None)

    def add_tokens(self, start: int, tokens: list[int]) -> bool:
        """Adds tokens from offset `start` on. Returns False, and adds none, if tokens before `start` are missing."""
        length = len(self.output)
        if start > length:
            return False
        if start + len(tokens) > length:
            self.output += tokens[length - start :]
            self._notify()
        return True

    def add_logprobs(self, logprobs: m.Logprobs) -> None:
        """Keeps log-probabilities that follow the kept ones. Others are duplicates, or will come again in order."""
        expected = self._next_logprob[logprobs.prompt]
        end = logprobs.start + len(logprobs.chosen) // 4
        if logprobs.start <= expected < end:
            self._logprobs.append(_without_first(logprobs, expected - logprobs.start))
            self._next_logprob[logprobs.prompt] = end
            self._notify()

    def finish(self, end: m.End) -> None:
        if self.end is None:
            self.end = end
            self._notify()

    def _notify(self) -> None:
        self.fresh = True
        self.on_fresh()

    def lost_worker(self, worker: tuple[str, int]) -> None:
        """Adds the worker to `deaths` if it had admitted the stream; workers lost before the last token are dropped."""
        if not self.acknowledged:
            return
        if len(self.output) != self._output_at_death:
            self.deaths.clear()
        self.deaths.add(worker)
        self._output_at_death = len(self.output)

    def may_resync(self, now: float) -> bool:
        due = now - self._resynced_at > RESYNC_INTERVAL_S
        if due:
            self._resynced_at = now
        return due


def _without_first(logprobs: m.Logprobs, n: int) -> m.Logprobs:
    """Returns the log-probabilities without those of the first `n` tokens."""
    if not n:
        return logprobs
    return msgspec.structs.replace(
        logprobs,
        start=logprobs.start + n,
        chosen=logprobs.chosen[4 * n :],
        top_ids=logprobs.top_ids[4 * n * logprobs.top :],
        top_logprobs=logprobs.top_logprobs[4 * n * logprobs.top :],
        ranks=logprobs.ranks[4 * n :],
    )
