"""The compute loop: receive, plan, launch, settle, publish; a turn launches one step and settles one.

Knows the scheduler, the runner, the desk and the link by their few methods. Where a step may run ahead, the one that
is settled is the one before it: the device computes while its last ids are read, told, and planned with. Otherwise it
is settled in the turn that launched it.

A step that raises is cut in halves until the culprit stands alone: only it fails, and only after the device has shown
that it still computes for others. A step that runs out of memory shrinks in the same way, down to single tokens, before
it fails anybody. What was launched behind a step that raised is forgotten, and planned again. Who is suspected of
having killed a worker (ledger.py) is run alone. A device that cannot compute ends the loop: nobody is told of a failure
that is not theirs, and what runs goes on in the next worker.
"""

import logging
import time
from collections import deque
from collections.abc import Callable

import torch

from shared import messages as m
from worker.engine.requests import RequestTable
from worker.observability.metrics import Metrics
from worker.observability.stats import Stats
from worker.run.in_flight import InFlightStep, StepOutput
from worker.run.runner import Runner
from worker.schedule.scheduler import Scheduler
from worker.schedule.sequence import Chunk, Plan, Sequence, SequenceUpdate
from worker.transport.server import WireServer

log = logging.getLogger("sluice.loop")

IDLE_S = 0.05
GAP_SAMPLES = 8  # inter-token gaps kept of one step


class Loop:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        request_table: RequestTable,
        link: WireServer,
        stats: Stats,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        *,
        canary_s: float = 0.0,
    ) -> None:
        """`canary_s`: after so long without a step the device is asked for one that is nobody's; 0: never."""
        self._scheduler = scheduler
        self._runner = runner
        self._request_table = request_table
        self._link = link
        self._stats = stats
        self._metrics = metrics
        self._clock = clock
        self._canary_s = canary_s
        self._last_computed = clock()  # when the device last computed
        self._in_flight: deque[InFlightStep] = deque()  # launched, not settled; two at most, and one between turns

    def run(self, stopped: Callable[[], bool]) -> None:
        """Until `stopped()`, and what is under way is settled; a turn without work waits for the inbox.

        Raises DeviceBroken.
        """
        while not stopped():
            if not self.turn():
                now = self._clock()
                self._link.wait(max(0.0, min(IDLE_S, self._scheduler.next_wakeup(now) - now)))
        self._land()
        self._request_table.publish(self._link, self._clock())

    def turn(self) -> bool:
        """One step; False when there was nothing to compute."""
        began = self._clock()
        self._link.progress()
        self._request_table.receive(self._link.inbox, began)
        plan = self._scheduler.plan(began)
        planned = self._clock()
        busy = bool(plan) or bool(self._in_flight)
        if plan:
            self._stats.speed.work(began)
            self._request_table.publish(self._link, began)  # admissions need not wait for the step
            self._compute(plan.chunks)
            self._metrics.step(plan, planned - began, self._clock() - planned)
        elif busy:
            self._land()
        else:
            self._idle(began)
        self._request_table.publish(self._link, began)
        if busy and not self._scheduler.has_work:
            self._link.refresh()
        return busy

    def _idle(self, now: float) -> None:
        self._request_table.crash_journal.record_idle()
        self._stats.speed.rest()
        if self._canary_s and now - self._last_computed >= self._canary_s:
            self._check_device()

    def _check_device(self) -> None:
        self._runner.check_device()
        self._last_computed = self._clock()

    def _compute(self, chunks: list[Chunk]) -> None:
        """One step; where there are suspects, one for all others and then one for each of them."""
        parts = _apart(chunks)
        for part in parts:
            self._launch(Plan(part))
            ahead = len(parts) == 1 and not part[0].sequence.crashes
            self._land(keep=1 if ahead and self._in_flight and self._in_flight[-1].may_overlap else 0)
            if part[0].sequence.crashes and part[0].samples:
                self._request_table.crash_journal.clear(part[0].sequence)
        self._last_computed = self._clock()

    def _launch(self, plan: Plan) -> None:
        """Puts a step behind those under way, or does what is to be done when that fails."""
        before = self._in_flight[-1] if self._in_flight else None
        self._request_table.crash_journal.record_step(_members(plan, before.plan if before is not None else None))
        try:
            flight = self._runner.launch(plan, before)
        except Exception as error:
            if before is not None:  # whose fault it is shows when it is tried again with nothing under way
                log.exception("a step behind another one could not be launched")
                self._land()
            else:
                self._recover(plan, error)
            return
        self._scheduler.launched(plan)
        self._in_flight.append(flight)

    def _land(self, keep: int = 0) -> None:
        """Settles steps, in their order, until no more than `keep` are under way."""
        while len(self._in_flight) > keep:
            flight = self._in_flight.popleft()
            try:
                sampled = flight.read()
            except Exception as error:
                self._in_flight.clear()
                self._scheduler.discard_in_flight()
                self._recover(flight.plan, error)
                return
            now = self._clock()
            self._report(flight.plan, sampled, self._scheduler.update(flight.plan, sampled.ids, now), now)

    def _recover(self, plan: Plan, error: Exception) -> None:
        """Nothing is under way, and nothing of this step was settled: any part of it can be tried again as it is."""
        log.error("a step of %d sequences, %d tokens failed", len(plan.chunks), plan.tokens, exc_info=error)
        chunks = self._scheduler.retryable(plan.chunks)
        if not chunks:
            return
        if len(chunks) < len(plan.chunks) or plan.drafts:  # what left meanwhile may have been at fault
            self._execute(chunks)
        elif len(chunks) > 1:
            for part in _halves(chunks):
                self._execute(part)
        elif chunks[0].length > 1 and isinstance(error, MemoryError | torch.OutOfMemoryError):
            self._execute([_shorter(chunks[0])])
        else:
            self._check_device()  # before anybody is told
            self._fail(chunks[0].sequence, error)

    def _execute(self, chunks: list[Chunk]) -> None:
        self._launch(Plan(chunks))
        self._land()

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self._scheduler.fail(sequence)
        self._request_table.end(sequence, m.Outcome.ERROR, self._clock(), f"{type(error).__name__}: {error}")

    def _report(self, plan: Plan, sampled: StepOutput, advances: list[SequenceUpdate], now: float) -> None:
        for sequence, logprobs in sampled.logprobs:
            self._request_table.logprobs(sequence, logprobs)
        gaps: list[float] = []
        generated = begun = 0
        for advance in advances:
            sequence = advance.sequence
            if advance.tokens:
                begun += not sequence.last_token  # its row was the prompt's last, not one of the answer's
                generated += len(advance.tokens)
                self._request_table.tokens(sequence, advance.tokens)
                self._time(sequence, len(advance.tokens), now, gaps)
            if advance.outcome is not None:
                self._request_table.end(sequence, advance.outcome, now, _why(advance))
        prompt = plan.tokens - len(sampled.ids) + begun
        self._stats.tokens(now, prompt, generated)
        self._stats.gaps(gaps)
        self._metrics.tokens(prompt, generated)

    def _time(self, sequence: Sequence, tokens: int, now: float, gaps: list[float]) -> None:
        if not sequence.last_token:
            self._stats.ttft.add(now - sequence.arrival)
        elif len(gaps) < GAP_SAMPLES:
            gaps.append((now - sequence.last_token) / tokens)
        sequence.last_token = now


def _members(plan: Plan, before: Plan | None) -> list[Sequence]:
    """Who is in a step, or in the one before, which is under way; each once."""
    members = [chunk.sequence for chunk in plan.chunks]
    return members if before is None else list(dict.fromkeys([*members, *(one.sequence for one in before.chunks)]))


def _apart(chunks: list[Chunk]) -> list[list[Chunk]]:
    suspects = [[chunk] for chunk in chunks if chunk.sequence.crashes]
    others = [chunk for chunk in chunks if not chunk.sequence.crashes] if suspects else chunks
    return [others, *suspects] if others else suspects


def _why(advance: SequenceUpdate) -> str:
    """A sequence that ends in an error without an exception is one whose grammar has no way on."""
    failed = advance.outcome is m.Outcome.ERROR and advance.sequence.constraint
    return failed.error if failed else ""


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
