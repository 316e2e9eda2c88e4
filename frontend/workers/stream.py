"""One sequence's output as it arrives at a frontend: in order, without holes, ending once.

Its truth is `have`, how many output tokens are here. Every run of tokens names its start, so
    start == have   the next ones
    start <  have   a duplicate, whose overlap is dropped
    start >  have   something is missing: the run is left alone and the link asks for it again
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from shared import messages as m
from shared.codec import pack_u32

RESYNC_S = 0.25  # at most one Resync in this time


def ignore() -> None:
    """For a stream that nobody listens to."""


class Batch(msgspec.Struct, gc=False):
    """All that a stream gained since it was last asked."""

    tokens: list[int]
    start: int  # output offset of tokens[0]
    logprobs: list[m.Logprobs]
    end: m.End | None


@dataclass(slots=True, eq=False)
class Stream:
    """One sequence's output as it arrives. Ends with exactly one `End`."""

    submit: m.Submit
    admission: asyncio.Future[int]
    seed: int = 0
    output: list[int] = field(default_factory=list)  # everything received, kept for resuming
    started: m.Timings = field(default_factory=m.Timings)  # as of its first token
    end: m.End | None = None
    deaths: set[tuple[str, int]] = field(default_factory=set)  # workers (address, epoch) lost since its last token
    submitted: float = field(default_factory=time.monotonic)
    acknowledged: bool = False  # by the worker where it is now
    fresh: bool = False  # there is something to gather
    on_fresh: Callable[[], None] = ignore  # called when it becomes so, or has more
    _crashed_at: int = -1
    _taken: int = 0
    _logprobs: list[m.Logprobs] = field(default_factory=list)
    _scored: list[int] = field(default_factory=lambda: [0, 1])  # next offset in output, in prompt (its first has none)
    _resynced: float = 0.0

    @property
    def id(self) -> int:
        """Of its latest Submit: it gets another each time it goes to a worker."""
        return self.submit.id

    def resubmit(self, id: int) -> None:
        """Makes `submit` the one that continues after what was received, under a new id."""
        sampling, now = self.submit.sampling, time.monotonic()
        if self.admission.done():
            sampling = msgspec.structs.replace(sampling, seed=self.seed)
        self.submit = msgspec.structs.replace(
            self.submit, id=id, sampling=sampling, generated=pack_u32(self.output), crashes=len(self.deaths),
            deadline_ms=self._left(now), original_id=self.submit.original_id or self.submit.id,
        )  # fmt: skip
        self.submitted, self.acknowledged = now, False

    def _left(self, now: float) -> int:
        """What is left of the milliseconds it was given, at least 1; 0: it was given none."""
        given = self.submit.deadline_ms
        return max(1, given - int(1e3 * (now - self.submitted))) if given else 0

    def gather(self) -> Batch:
        """All news since the last time; empty when it is not `fresh`."""
        self.fresh = False
        start, self._taken = self._taken, len(self.output)
        logprobs = self._logprobs
        if logprobs:
            self._logprobs = []
        return Batch(self.output[start:], start, logprobs, self.end)

    def take(self, start: int, run: list[int]) -> bool:
        """False when tokens before `start` are missing."""
        have = len(self.output)
        if start > have:
            return False
        if start + len(run) > have:
            self.output += run[have - start :]
            self.wake()
        return True

    def wake(self) -> None:
        self.fresh = True
        self.on_fresh()

    def finish(self, end: m.End) -> None:
        if self.end is None:
            self.end = end
            self.wake()

    def take_logprobs(self, logprobs: m.Logprobs) -> None:
        """Keeps what continues those already here; the rest is a duplicate, or comes again after a Resync."""
        have = self._scored[logprobs.prompt]
        end = logprobs.start + len(logprobs.chosen) // 4
        if logprobs.start <= have < end:
            self._logprobs.append(_skip(logprobs, have - logprobs.start))
            self._scored[logprobs.prompt] = end
            self.wake()

    def lost_worker(self, worker: tuple[str, int]) -> None:
        """Notes a worker that was lost with it. Only those since its last token count, and none that never had it."""
        if not self.acknowledged:
            return
        if len(self.output) != self._crashed_at:
            self.deaths.clear()
        self.deaths.add(worker)
        self._crashed_at = len(self.output)

    def may_resync(self, now: float) -> bool:
        due = now - self._resynced > RESYNC_S
        if due:
            self._resynced = now
        return due


def _skip(logprobs: m.Logprobs, n: int) -> m.Logprobs:
    if not n:
        return logprobs
    return msgspec.structs.replace(
        logprobs,
        start=logprobs.start + n,
        chosen=logprobs.chosen[4 * n :],
        top_ids=logprobs.top_ids[4 * n * logprobs.top :],
        top_logprobs=logprobs.top_logprobs[4 * n * logprobs.top :],
    )
