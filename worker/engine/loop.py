"""The compute loop. An iteration receives messages, plans and launches one step, applies results, and publishes them.

If steps may overlap, an iteration launches a step and then applies the results of the oldest step in flight: of the
previous step or, in a pipeline, of one before it. The device then computes while the worker publishes ids and plans the
next step. Otherwise, the iteration that launches a step also applies its results.

How failures are isolated:
- A step that raises is bisected until one sequence is left. Only that sequence fails, and only after the device has
  computed a dummy step, which shows that the device still works for other sequences.
- A step that runs out of memory is bisected in the same way. If one sequence alone still runs out of memory, its chunk
  is halved, down to a single token, before the sequence fails.
- Steps launched after a failed one are discarded and planned again.
- A request suspected of having crashed a worker (crash_journal.py) runs in steps of its own.
- A device that fails the dummy step ends the loop with DeviceBroken. No request is reported as failed, and the running
  requests continue in the next worker.
"""

import logging
import time
from collections import deque
from collections.abc import Callable

import torch

from shared import messages as m
from shared.machine import return_memory
from worker.engine.metrics import Metrics, Stats
from worker.engine.requests import RequestTable
from worker.engine.transport import WireServer
from worker.model_runner.step import AnyStep, StepOutput, StepRunner
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Chunk, Plan, Sequence, SequenceUpdate

log = logging.getLogger("sluice.loop")
MAX_IDLE_WAIT_S = 0.05
TRIM_AFTER_S = 5.0  # after so long without a step, freed memory goes back to the system
MAX_ITL_SAMPLES = 8  # inter-token latencies recorded per step


class Loop:
    def __init__(
        self, scheduler: Scheduler, runner: StepRunner, request_table: RequestTable, server: WireServer, stats: Stats,
        metrics: Metrics, clock: Callable[[], float] = time.monotonic, *, canary_s: float = 0.0,
    ) -> None:  # fmt: skip
        """canary_s: after this many seconds without a step, a dummy step checks the device; 0 turns the check off."""
        self._scheduler, self._runner, self._request_table = scheduler, runner, request_table
        self._server, self._stats, self._metrics = server, stats, metrics
        self._clock, self._canary_s = clock, canary_s
        self._last_computed = clock()
        self._trimmed = True  # whether nothing was computed since memory went back to the system
        # called in each iteration for work between steps, such as encoding images; returns whether it did any
        self.between_steps: Callable[[Plan], bool] | None = None
        self._in_flight: deque[AnyStep] = deque()  # between iterations, at most as many as AnyStep.steps_behind allows

    @property
    def in_flight(self) -> int:
        """The number of steps that are launched but whose results are not applied yet."""
        return len(self._in_flight)

    def run(self, stopped: Callable[[], bool]) -> None:
        """Iterates until `stopped()`, then drains. Iterations without work wait for messages. Raises DeviceBroken."""
        while not stopped():
            if not self.iterate():
                now = self._clock()
                self._server.wait(max(0.0, min(MAX_IDLE_WAIT_S, self._scheduler.next_wakeup(now) - now)))
        self._drain()
        self._request_table.publish(self._server, self._clock())

    def iterate(self) -> bool:
        """Launches the next step or, if there is none, applies the results of the oldest step in flight.

        Returns False if there was nothing to do.
        """
        began = self._clock()
        self._server.progress()
        self._request_table.receive(self._server.inbox, began)
        plan = self._scheduler.plan(began)
        planned = self._clock()
        busy = bool(plan) or bool(self._in_flight)
        if plan:
            self._stats.speed.busy(began)
            self._request_table.publish(self._server, began)  # sends admissions before the step is computed
            self._compute(plan.chunks)
            self._metrics.step(plan, planned - began, self._clock() - planned)
        elif busy:
            self._drain(leave=len(self._in_flight) - 1)
        if self.between_steps is not None:
            busy |= self.between_steps(plan)
        if not busy:
            self._idle(began)
        self._request_table.publish(self._server, began)
        if busy and not self._scheduler.has_work:
            self._server.refresh()
        return busy

    def _idle(self, now: float) -> None:
        if self._scheduler.masked:
            self._request_table.crash_journal.record_step(self._scheduler.masked)
        else:
            self._request_table.crash_journal.record_idle()
        self._stats.speed.idle()
        if not self._trimmed and now - self._last_computed >= TRIM_AFTER_S:
            # logits of many rows and large grammars leave hundreds of MiB in glibc's arenas
            self._trimmed = True
            return_memory()
        if self._canary_s and now - self._last_computed >= self._canary_s:
            self._check_device()

    def _check_device(self) -> None:
        self._runner.check_device()
        self._last_computed = self._clock()

    def _compute(self, chunks: list[Chunk]) -> None:
        """Computes the chunks in one step, which may stay in flight."""
        if any([chunk.sequence.history.crashes for chunk in chunks]):
            self._compute_suspects(chunks)
        else:
            self._launch(Plan(chunks))
            self._drain(leave=self._in_flight[-1].steps_behind if self._in_flight else 0)
        self._last_computed, self._trimmed = self._clock(), False

    def _launch(self, plan: Plan) -> None:
        """Launches a step after those in flight, or recovers when the launch fails."""
        before = self._in_flight[-1] if self._in_flight else None
        to_blame = _sequences(plan, [step.plan for step in self._in_flight])
        self._request_table.crash_journal.record_step(to_blame + self._scheduler.masked)
        try:
            step = self._runner.launch(plan, before)
        except Exception as error:
            if before is not None:  # either step may be the cause; the new step is planned again after the drain
                log.exception("a step behind another one could not be launched")
                self._drain()
            else:
                self._recover(plan, error)
            return
        self._scheduler.launched(plan)
        self._in_flight.append(step)

    def _drain(self, leave: int = 0) -> None:
        """Reads and applies the results of steps, in order of launch, until at most `leave` steps are in flight."""
        while len(self._in_flight) > leave:
            step = self._in_flight.popleft()
            try:
                output = step.read()
            except Exception as error:
                self._in_flight.clear()
                self._scheduler.discard_in_flight()
                self._recover(step.plan, error)
                return
            now = self._clock()
            self._report(step.plan, output, self._scheduler.update(step.plan, output.ids, now), now)

    def _report(self, plan: Plan, output: StepOutput, updates: list[SequenceUpdate], now: float) -> None:
        self._request_table.add_extras(output)
        latencies: list[float] = []
        generated = prompts_done = 0
        for update in updates:
            sequence = update.sequence
            if update.tokens:
                self._request_table.add_tokens(sequence, update.tokens)
                if sequence.check is None:
                    prompts_done += not sequence.history.last_token  # the first id's row belongs to the prompt
                    generated += len(update.tokens)
                    self._record_latency(sequence, len(update.tokens), now, latencies)
                sequence.history.last_token = now
            if update.outcome is not None:
                self._request_table.end(sequence, update.outcome, now, _grammar_error(update))
        checked = sum([chunk.rows for chunk in plan.chunks if chunk.sequence.check is not None])  # prompt tokens
        prompt_tokens = plan.tokens - len(output.ids) + checked + prompts_done
        self._stats.tokens(now, prompt_tokens, generated)
        self._stats.gaps(latencies)
        self._metrics.tokens(prompt_tokens, generated)

    def _record_latency(self, sequence: Sequence, tokens: int, now: float, latencies: list[float]) -> None:
        if not sequence.history.last_token:
            self._stats.ttft.add(now - sequence.history.arrival)
        elif len(latencies) < MAX_ITL_SAMPLES:
            latencies.append((now - sequence.history.last_token) / tokens)

    # sequences that make steps fail or workers crash

    def _compute_suspects(self, chunks: list[Chunk]) -> None:
        """Computes each sequence that is suspected of having crashed a worker in a step of its own."""
        if self._in_flight:
            return self._drain()  # the chunks are planned again when no other step is in flight
        for step in isolate_suspects(chunks):
            self._launch(Plan(step))
            self._drain()
            if step[0].sequence.history.crashes and step[0].samples:
                self._request_table.crash_journal.clear(step[0].sequence)

    def _recover(self, plan: Plan, error: Exception) -> None:
        """Bisects a failed step. No step is in flight and none of its results is applied, so any part can rerun."""
        log.error("a step of %d sequences, %d tokens failed", len(plan.chunks), plan.tokens, exc_info=error)
        chunks = self._scheduler.retryable(plan.chunks)
        if not chunks:
            return
        if len(chunks) < len(plan.chunks) or plan.drafts:  # the cause may be a removed sequence or draft: try the rest
            self._retry(chunks)
        elif len(chunks) > 1:
            for part in bisect(chunks):
                self._retry(part)
        elif (half := self._half(chunks[0], error)) is not None:
            self._retry([half])
        else:
            self._check_device()  # raises before the sequence is reported as failed
            self.fail(chunks[0].sequence, error)

    def _half(self, chunk: Chunk, error: Exception) -> Chunk | None:
        """Returns the first half of a chunk that needs too much memory; None for another error or a whole text."""
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) or not self._runner.cuts_prompts:
            return None
        return first_half(chunk)

    def _retry(self, chunks: list[Chunk]) -> None:
        self._launch(Plan(chunks))
        self._drain()

    def fail(self, sequence: Sequence, error: Exception) -> None:
        self._scheduler.fail(sequence)
        self._request_table.end(sequence, m.Outcome.ERROR, self._clock(), f"{type(error).__name__}: {error}")


def _sequences(plan: Plan, in_flight: list[Plan]) -> list[Sequence]:
    """Returns the sequences of a step and of the steps in flight before it, without duplicates."""
    sequences = [chunk.sequence for chunk in plan.chunks]
    if not in_flight:
        return sequences
    return list(dict.fromkeys([*sequences, *(chunk.sequence for other in in_flight for chunk in other.chunks)]))


def _grammar_error(update: SequenceUpdate) -> str:
    """Returns the grammar's error if the sequence ended because its grammar allows no token, else ""."""
    failed = update.outcome is m.Outcome.DEAD_END and update.sequence.constraint
    return failed.error if failed else ""


# Splits steps, so that a sequence that makes a step fail or a worker crash harms no other sequence.


def isolate_suspects(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Splits a step so that each sequence that is suspected of having crashed a worker has a step of its own."""
    suspects = [[chunk] for chunk in chunks if chunk.sequence.history.crashes]
    others = [chunk for chunk in chunks if not chunk.sequence.history.crashes] if suspects else chunks
    return [others, *suspects] if others else suspects


def first_half(chunk: Chunk) -> Chunk | None:
    """Returns the first half of a chunk, to be retried alone; None if the chunk cannot be cut.

    The scheduler plans the second half in a later step.
    """
    half, images = chunk.length // 2, chunk.sequence.images
    if images is not None:
        half = images.uncut(chunk.start, half, most=chunk.length - 1)
    return Chunk(chunk.sequence, chunk.start, half, False) if half else None


def bisect(chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
    """Splits a failed step in two: sequences that have already produced tokens, and new ones.

    If all sequences are old, or all are new, the step is split into halves.
    """
    proven = [chunk for chunk in chunks if _has_run(chunk)]
    if 0 < len(proven) < len(chunks):
        return proven, [chunk for chunk in chunks if not _has_run(chunk)]
    middle = len(chunks) // 2
    return chunks[:middle], chunks[middle:]


def _has_run(chunk: Chunk) -> bool:
    return chunk.start > 0 and chunk.sequence.output_len > 0
