"""The compute loop: receive, plan, run, commit, publish; one turn is one step.

Knows the scheduler, the runner, the desk and the link by their few methods. A step that raises is cut in halves
until the culprit stands alone: only it fails. A step that runs out of memory shrinks in the same way, down to
single tokens, before it fails anybody.
"""

import logging
import time
from collections.abc import Callable

import torch

from shared import messages as m
from worker.desk import Desk
from worker.link import Link
from worker.metrics import Metrics
from worker.run.runner import Runner, Sampled
from worker.schedule.plan import Chunk, Plan
from worker.schedule.scheduler import Advance, Scheduler
from worker.schedule.sequence import Sequence
from worker.stats import Stats

log = logging.getLogger("sluice.loop")

IDLE_S = 0.05
GAP_SAMPLES = 8  # inter-token gaps kept of one step


class Loop:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        desk: Desk,
        link: Link,
        stats: Stats,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._desk = desk
        self._link = link
        self._stats = stats
        self._metrics = metrics
        self._clock = clock

    def run(self, stopped: Callable[[], bool]) -> None:
        """Until `stopped()`; a turn without work waits for the inbox."""
        while not stopped():
            if not self.turn():
                now = self._clock()
                self._link.wait(max(0.0, min(IDLE_S, self._scheduler.next_wakeup(now) - now)))

    def turn(self) -> bool:
        """One step; False when there was nothing to compute."""
        began = self._clock()
        self._link.turned = time.monotonic()
        self._desk.receive(self._link.inbox, began)
        plan = self._scheduler.plan(began)
        planned = self._clock()
        if plan:
            self._desk.publish(self._link, began)  # admissions need not wait for the step
            self._execute(plan.chunks)
            self._metrics.step(plan, planned - began, self._clock() - planned)
        self._desk.publish(self._link, began)
        if plan and not self._scheduler.has_work:
            self._link.refresh()
        return bool(plan)

    def _execute(self, chunks: list[Chunk]) -> None:
        plan = Plan(chunks)
        try:
            sampled = self._runner.step(plan)
        except Exception as error:
            log.exception("a step of %d sequences, %d tokens failed", len(chunks), plan.tokens)
            self._recover(chunks, error)
            return
        now = self._clock()
        self._report(plan, sampled, self._scheduler.commit(plan, sampled.ids, now), now)

    def _recover(self, chunks: list[Chunk], error: Exception) -> None:
        """Nothing was committed, so any part of the step can be tried again as it is."""
        if len(chunks) > 1:
            for part in _halves(chunks):
                self._execute(part)
        elif chunks[0].length > 1 and isinstance(error, MemoryError | torch.OutOfMemoryError):
            self._execute([_shorter(chunks[0])])
        else:
            self._fail(chunks[0].sequence, error)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self._scheduler.fail([sequence])
        self._desk.end(sequence, m.Outcome.ERROR, self._clock(), f"{type(error).__name__}: {error}")

    def _report(self, plan: Plan, sampled: Sampled, advances: list[Advance], now: float) -> None:
        for sequence, logprobs in sampled.logprobs:
            self._desk.logprobs(sequence, logprobs)
        gaps: list[float] = []
        generated = 0
        for advance in advances:
            sequence = advance.sequence
            if advance.token is not None:
                generated += 1
                self._desk.token(sequence, advance.token)
                self._time(sequence, now, gaps)
            if advance.outcome is not None:
                self._desk.end(sequence, advance.outcome, now)
        prompt = plan.tokens - generated
        self._stats.tokens(now, prompt, generated)
        self._stats.gaps(gaps)
        self._metrics.tokens(prompt, generated)

    def _time(self, sequence: Sequence, now: float, gaps: list[float]) -> None:
        if not sequence.last_token:
            self._stats.ttft.add(now - sequence.arrival)
        elif len(gaps) < GAP_SAMPLES:
            gaps.append(now - sequence.last_token)
        sequence.last_token = now


def _shorter(chunk: Chunk) -> Chunk:
    """Its first half; the rest is planned again."""
    return Chunk(chunk.sequence, chunk.start, chunk.length // 2, False)


def _halves(chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
    """What ran well before and what is new; or, where that says nothing, two halves."""
    old = [chunk for chunk in chunks if chunk.start > 0 and chunk.sequence.output_len > 0]
    if 0 < len(old) < len(chunks):
        return old, [chunk for chunk in chunks if not (chunk.start > 0 and chunk.sequence.output_len > 0)]
    middle = len(chunks) // 2
    return chunks[:middle], chunks[middle:]
