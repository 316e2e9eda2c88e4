"""The request table: turns messages from frontends into scheduler calls, and results into messages to frontends.

The table keeps every request from its Submit to its one End, and KEEP_FINISHED_S longer, so that a frontend that lost a
frame can ask for the output again. A StepBuilder collects the results of one loop iteration for one frontend, and they
are sent in one message. This module computes nothing on the device.
"""

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import msgspec

from shared import messages as m
from shared.checkpoint import GENERATE, Task
from shared.messages import Submit
from shared.messages.requests import ids_in_lists
from shared.wire import unpack_u32
from worker.engine.crash_journal import CrashJournal
from worker.engine.metrics import SUCCESSES, Metrics, Stats
from worker.engine.step_message import StepBuilder
from worker.engine.transport import FrontendGone, WireServer
from worker.engine.validation import FEW_LIST_IDS, check_lists, check_submit, no_images
from worker.model_runner.step import StepOutput
from worker.scheduler.host_budget import host_work
from worker.scheduler.queue import Refused
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Key, PrefixState, RequestStats, SchedulingParams, Sequence
from worker.structured_output.pending import PendingSequences, constrain

if TYPE_CHECKING:
    from worker.engine.kv_store import HandOver
    from worker.lora.store import AdapterStore
    from worker.model_runner.logprobs import PromptVector
    from worker.structured_output.compiler import GrammarCompiler


# The record of a request: its sequence, and all results other than tokens, so that they can be sent again.


@dataclass(slots=True)
class TrackedRequest:
    """An admitted request. The record is kept for some time after the request has ended."""

    sequence: Sequence
    end: m.End | None = None
    logprobs: list[m.Logprobs] = field(default_factory=list)
    vector: "PromptVector | None" = None  # collects the rows of a request with `pooling`; None after its end
    pooled: m.Pooled | None = None  # the result of a request with `pooling`

    def expects(self, logprobs: m.Logprobs) -> bool:
        """Whether log-probabilities belong to the output: not if the sequence left, or lost their id by preemption."""
        return self.end is None and (logprobs.prompt or logprobs.start < self.sequence.output_len)

    def send_again(self, builder: StepBuilder, offset: int) -> None:
        """Adds the output from token `offset` on, and the End if the request has ended."""
        sequence, id = self.sequence, self.sequence.key[1]
        builder.admitted.append(m.Admitted(id, sequence.seed))
        builder.logprobs += [lp for lp in self.logprobs if lp.prompt or lp.start + len(lp.chosen) // 4 > offset]
        builder.add(id, offset, sequence.tokens[sequence.prompt_len + offset :])
        if self.pooled is not None:
            builder.pooled.append(self.pooled)
        if self.end is not None:
            builder.ends.append(self.end)

    def finish_vector(self, builder: StepBuilder) -> tuple[m.Outcome, str]:
        """Adds the vector of a request whose prompt is computed. Returns the outcome, and the error if it failed."""
        assert self.vector is not None
        try:
            self.pooled = m.Pooled(self.sequence.key[1], self.vector.values())
        except ValueError as error:
            return m.Outcome.ERROR, str(error)
        builder.pooled.append(self.pooled)
        return m.Outcome.POOLED, ""


def new_record(sequence: Sequence) -> TrackedRequest:
    """Returns the record of a request that is about to be queued."""
    if sequence.pooling is None:
        return TrackedRequest(sequence)
    from worker.model_runner.logprobs import PromptVector

    return TrackedRequest(sequence, vector=PromptVector(sequence.pooling))


KEEP_FINISHED_S = 30.0  # how long a frontend can still ask for the output of a finished request
# All sequences wait while messages are handled. A plain one takes 30 µs, one with 150,000 ids in lists 30 ms.
MAX_RECEIVE_S = 0.02
QUARANTINE_CRASHES = 2  # a request is refused after this many crashes in its steps without progress


class RequestTable:
    """All requests of this worker. In every method, `now` is the time of the loop's clock in seconds."""

    def __init__(
        self, scheduler: Scheduler, stats: Stats, metrics: Metrics, *, vocab_size: int, seeds: random.Random,
        crash_journal: CrashJournal | None = None, compiler: "GrammarCompiler | None" = None,
        adapters: "AdapterStore | None" = None, task: Task = GENERATE,
        give_images: Callable[[Sequence, m.Submit], None] = no_images,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """task: the model's task, which is `generate` for text. give_images: checks images; raises Refused.

        clock: seconds, which limit how long messages are handled
        """
        self.draining, self._clock = False, clock
        # waits until the K/V store has what was computed for other workers; None: there is no store
        self.hand_over: HandOver | None = None
        self.crash_journal = crash_journal or CrashJournal()
        self._scheduler = scheduler
        self._stats = stats
        self._metrics = metrics
        self._vocab_size, self._task = vocab_size, task
        self._backlog = Backlog(scheduler, stats)
        self._seeds = seeds
        self._compiler, self._adapters, self._give_images = compiler, adapters, give_images
        self._preparing = PendingSequences()
        self._records: dict[Key, TrackedRequest] = {}
        self._ended: deque[tuple[float, Key]] = deque()
        self._builders: defaultdict[bytes, StepBuilder] = defaultdict(StepBuilder)

    # messages from frontends

    def receive(self, inbox: deque[tuple[bytes, m.Request | FrontendGone]], now: float) -> None:
        """Handles the messages in the inbox, queues prepared requests, and ends requests past their deadlines.

        Messages that come later, or would be handled after more than MAX_RECEIVE_S, wait for the next iteration.
        """
        until = self._clock() + MAX_RECEIVE_S
        for number in range(len(inbox)):
            if number and self._clock() > until:
                break
            sender, request = inbox.popleft()
            match request:
                case m.Submit():
                    self._submit(sender, request, now)
                case m.Abort():
                    for key in self._keys_of(sender, request.ids):
                        self._abort(key, now)
                case m.Resync():
                    self._resync(sender, request.id, request.offset)
                case m.ResetPrefixCache():
                    self._scheduler.reset_prefix_cache(request.nonce)
                case m.Lease():
                    self._abort_unleased(sender, request, now)
                case FrontendGone():
                    self._forget_frontend(sender, now)
        if self._preparing:
            self._enqueue_prepared(now)
        for sequence in self._scheduler.expire(now):
            self.end(sequence, m.Outcome.DEADLINE, now, "the deadline passed")
        if self.hand_over is not None:
            for sequence in self.hand_over.take(now):
                self.end(sequence, m.Outcome.PREFILLED, now)

    def _submit(self, sender: bytes, submit: m.Submit, now: float) -> None:
        key = (sender, submit.id)
        if key in self._records:  # the frontend repeats a Submit whose answer was lost
            self._resync(sender, submit.id, len(submit.generated) // 4)
        elif key not in self._preparing:  # a request that is still being prepared is answered later
            try:
                rejected = self._accept(key, submit, now)
            except Refused as refused:
                rejected = m.Rejected(submit.id, refused.reason, str(refused), 1.0)
            except ImportError as missing:
                rejected = m.Rejected(submit.id, m.Refusal.INVALID, f"this worker lacks a part for it: {missing}")
            if rejected is not None:
                self._reject(sender, rejected)

    def _accept(self, key: Key, submit: m.Submit, now: float) -> m.Rejected | None:
        """Queues a request, or starts to prepare its grammar or adapter. Returns a rejection, or raises Refused."""
        first_key = key[0], submit.original_id or submit.id
        crash_count = self.crash_journal.crash_count(first_key, submit.crashes)
        if rejected := self._check(submit, crash_count, now):
            return rejected
        seed = submit.sampling.seed
        seed = seed if seed is not None else self._seeds.getrandbits(53)  # JavaScript and jq represent 53 bits exactly
        sequence = sequence_of(key, submit, seed, now, crash_count)
        if submit.images:
            self._give_images(sequence, submit)
        if submit.sampling.grammar or submit.adapter is not None:
            self._preparing.begin(sequence, self._compiler, self._adapters, self._scheduler.sequences)
            return None  # the request is admitted or rejected when the preparation has finished
        problem = constrain(sequence) if submit.sampling.has_token_rules else ""
        return m.Rejected(submit.id, m.Refusal.INVALID, problem) if problem else self._enqueue(sequence, now)

    def _check(self, submit: m.Submit, crash_count: int, now: float) -> m.Rejected | None:
        if rejected := self._reject_if_draining(submit.id):
            return rejected
        if crash_count >= QUARANTINE_CRASHES:
            return m.Rejected(submit.id, m.Refusal.INVALID, f"quarantined: in flight in {crash_count} worker crashes")
        longest = self._scheduler.config.max_seq_len
        if len(submit.prompt) + max(len(submit.generated), len(submit.answer or b"")) > 4 * longest:  # 4 bytes per id
            return m.Rejected(submit.id, m.Refusal.TOO_LONG, f"`prompt` has more than {longest} tokens")
        problem = check_submit(submit, self._vocab_size, self._task)
        if problem:
            return m.Rejected(submit.id, m.Refusal.INVALID, problem)
        live = (one for each in (self._scheduler.sequences, self._preparing.sequences) for one in each())
        if ids_in_lists(submit.sampling) > FEW_LIST_IDS and (problem := check_lists(submit, live)):
            return m.Rejected(submit.id, m.Refusal.QUEUE_FULL, problem, self._backlog.seconds(now))
        return None

    def _reject_if_draining(self, id: int) -> m.Rejected | None:
        return m.Rejected(id, m.Refusal.DRAINING, "the server is shutting down", 5.0) if self.draining else None

    def _enqueue(self, sequence: Sequence, now: float) -> m.Rejected | None:
        record = new_record(sequence)
        try:
            self._scheduler.submit(sequence, now)
        except Refused as refused:
            retry_after_s = self._backlog.seconds(now) if refused.reason is m.Refusal.QUEUE_FULL else 0.0
            return m.Rejected(sequence.key[1], refused.reason, str(refused), retry_after_s)
        self._admit(record)
        return None

    def _admit(self, record: TrackedRequest) -> None:
        sequence = record.sequence
        self._records[sequence.key] = record
        self._builders[sequence.key[0]].admitted.append(m.Admitted(sequence.key[1], sequence.seed))

    def _reject(self, sender: bytes, rejected: m.Rejected) -> None:
        self._metrics.rejected(rejected.reason)
        self._builders[sender].rejected.append(rejected)

    def _abort(self, key: Key, now: float) -> None:
        sequence = self._scheduler.abort(key)
        if sequence is not None:
            self.end(sequence, m.Outcome.ABORTED, now)
        elif unqueued := self._preparing.remove(key):
            self._end_unqueued(unqueued, m.Outcome.ABORTED, now)
        elif self.hand_over is not None and (computed := self.hand_over.remove(key)):
            self.end(computed, m.Outcome.ABORTED, now)

    # results for frontends

    def add_tokens(self, sequence: Sequence, tokens: list[int]) -> None:
        """Adds new output tokens, which are the last ones of `sequence.tokens`."""
        sender, id = sequence.key
        builder = self._builders[sender]
        builder.add(id, sequence.output_len - len(tokens), tokens)
        if not sequence.history.last_token:
            builder.started.append(m.Started(id, _timings(sequence, sequence.history.first_token)))

    def add_extras(self, output: StepOutput) -> None:
        """Adds the log-probabilities and pooled rows of a step. Call it before add_tokens() and end()."""
        for sequence, logprobs in output.logprobs:
            record = self._records.get(sequence.key)
            if record is not None and record.expects(logprobs):
                record.logprobs.append(logprobs)
                self._builders[sequence.key[0]].logprobs.append(logprobs)
        for sequence, start, rows in output.pooled:
            record = self._records.get(sequence.key)
            if record is not None and record.vector is not None:
                record.vector.add(start, rows)

    def end(self, sequence: Sequence, outcome: m.Outcome, now: float, error: str = "") -> None:
        """Ends a request. Later calls for the same request change nothing.

        A request whose prompt is computed for another worker ends when the K/V store has the prompt's pages.
        """
        sender, id = sequence.key
        record = self._records.get(sequence.key)
        if record is None or record.end is not None:
            return
        if sequence.history.prefill is m.Prefill.ONLY and outcome in (m.Outcome.LENGTH, m.Outcome.EOS, m.Outcome.STOP):
            if self.hand_over is not None:
                self.hand_over.begin(sequence, now)
                return
            outcome = m.Outcome.PREFILLED
        if outcome is m.Outcome.POOLED:
            outcome, error = record.finish_vector(self._builders[sender])
        record.vector = sequence.adapter = sequence.images = sequence.mirostat = None
        record.end = m.End(id, outcome, sequence.output_len, error, _timings(sequence, now), _predicted(sequence))
        self._builders[sender].ends.append(record.end)
        self._ended.append((now, sequence.key))
        self._metrics.ended(outcome, sequence, now)
        if outcome in SUCCESSES:
            self._stats.e2e.add(now - sequence.history.arrival)

    def publish(self, server: WireServer, now: float) -> None:
        """Sends the messages that this iteration has collected. Forgets requests that ended KEEP_FINISHED_S ago."""
        while self._ended and self._ended[0][0] < now - KEEP_FINISHED_S:
            self._records.pop(self._ended.popleft()[1], None)
        if not self._builders:
            return
        for sender, builder in self._builders.items():
            for part in builder.parts():
                server.publish(sender, part.build())
        self._builders.clear()
        server.flush()

    # lost messages and lost frontends

    def _resync(self, sender: bytes, id: int, offset: int) -> None:
        """Sends the whole output from token `offset` on again, and the End if the request has ended."""
        if (sender, id) in self._preparing:  # nothing has been sent about this request yet
            return
        record = self._records.get((sender, id))
        builder = self._builders[sender]
        if id in builder.repaired:
            return
        builder.repaired.add(id)
        if record is None:
            builder.unknown.append(id)
            return
        record.send_again(builder, offset)

    def _abort_unleased(self, sender: bytes, lease: m.Lease, now: float) -> None:
        """Aborts requests that are missing from their frontend's Lease: the Abort was lost or overtook the Submit."""
        leased = {*unpack_u32(lease.ids)}  # ids after lease.last_id are newer than the lease; 32-bit ids wrap around
        live = [id for (frontend, id), record in self._records.items() if frontend == sender and record.end is None]
        for id in [*live, *(id for frontend, id in self._preparing if frontend == sender)]:
            if id not in leased and (lease.last_id - id) % (1 << 32) < 1 << 31:
                self._abort((sender, id), now)

    def _keys_of(self, sender: bytes, ids: tuple[int, ...]) -> list[Key]:
        """Returns the keys of these ids. If there are more ids than requests, returns only keys of known requests."""
        if len(ids) <= len(self._records) + len(self._preparing):
            return [(sender, id) for id in ids]
        requested = frozenset(ids)
        return [key for key in (*self._records, *self._preparing) if key[0] == sender and key[1] in requested]

    def _forget_frontend(self, sender: bytes, now: float) -> None:
        for key in [key for key in (*self._records, *self._preparing) if key[0] == sender]:
            self._abort(key, now)
            self._records.pop(key, None)
        self._builders.pop(sender, None)  # if the frontend returns, it submits again and must not get these Ends

    def end_all(self, outcome: m.Outcome, now: float, error: str) -> None:
        """Ends every request that has not ended. Requests that were not admitted yet are rejected."""
        for sequence in self.hand_over.clear() if self.hand_over is not None else ():
            self.end(sequence, m.Outcome.PREFILLED, now)
        for record in [record for record in self._records.values() if record.end is None]:
            self._scheduler.abort(record.sequence.key)
            self.end(record.sequence, outcome, now, error)
        for sender, id in list(self._preparing):
            self._preparing.remove((sender, id))
            self._reject(sender, m.Rejected(id, m.Refusal.DRAINING, error, 5.0))

    # requests whose grammar is being compiled or whose adapter is being read

    def _enqueue_prepared(self, now: float) -> None:
        """Queues sequences whose preparation has finished, and ends sequences past their deadlines."""
        for sequence in self._preparing.expire(now):
            self._end_unqueued(sequence, m.Outcome.DEADLINE, now, "the deadline passed")
        if self._adapters is not None:
            self._preparing.retry_waiting(self._adapters, self._scheduler.sequences)
        for sequence, problem in self._preparing.take_ready():
            sender, id = sequence.key
            invalid = m.Rejected(id, m.Refusal.INVALID, problem) if problem else None
            rejected = invalid or self._reject_if_draining(id) or self._enqueue(sequence, now)
            if rejected is not None:
                self._reject(sender, rejected)

    def _end_unqueued(self, sequence: Sequence, outcome: m.Outcome, now: float, error: str = "") -> None:
        """Admits and immediately ends a sequence that was never queued, in one message."""
        self._admit(TrackedRequest(sequence))
        self.end(sequence, outcome, now, error)


def _timings(sequence: Sequence, now: float) -> m.Timings:
    history = sequence.history
    admitted = history.admitted or now
    first = history.first_token or now
    return m.Timings(
        queue_ms=1e3 * (admitted - history.arrival), prefill_ms=1e3 * (first - admitted), decode_ms=1e3 * (now - first),
        cached_tokens=sequence.prefix.cached_tokens, drafts=(history.drafted, history.accepted),
    )  # fmt: skip


def _predicted(sequence: Sequence) -> tuple[int, int] | None:
    prediction = sequence.prediction
    return None if prediction is None else (prediction.accepted, prediction.rejected)


# Makes a Sequence from a Submit: the plain request, and a record for each feature that the request asks for.


def sequence_of(key: Key, submit: Submit, seed: int, now: float, crashes: int) -> Sequence:
    """Returns the sequence of a request that check_submit() has accepted.

    now: seconds of the loop's clock; crashes: how many workers the request is suspected of having crashed. Raises
    ImportError if the worker lacks the module of a feature.
    """
    prompt, sampling = unpack_u32(submit.prompt).tolist(), submit.sampling
    if submit.prefill is m.Prefill.ONLY:
        sampling = msgspec.structs.replace(sampling, max_tokens=0)
    deadline = now + submit.deadline_ms / 1e3 if submit.deadline_ms else inf
    sequence = Sequence(
        key,
        prompt + unpack_u32(submit.generated).tolist(),
        len(prompt),
        sampling,
        seed,
        turn=SchedulingParams(submit.group, submit.priority, deadline, submit.tenant),
        history=RequestStats(
            now,
            crashes=crashes,
            resumed=submit.crashes > 0 or submit.prefill is m.Prefill.DONE,
            original_id=submit.original_id,
            prefill=submit.prefill,
        ),
        prefix=PrefixState(submit.cache_salt, keep_s=submit.keep_s),
        pooling=submit.pooling,
        second_from=submit.second_from,
        host=host_work(submit.sampling, checked=submit.answer is not None),
    )
    if submit.sampling.logit_bias:  # the arrays of `sequence.logits_processing` take a tenth of the memory
        sequence.sampling = msgspec.structs.replace(sampling, logit_bias=())
    if submit.adapter is not None:
        from worker.scheduler.sequence import AdapterUse

        sequence.adapter = AdapterUse(submit.adapter)
    if submit.answer is not None:
        from worker.scheduler.sequence import AnswerCheck

        sequence.check = AnswerCheck(unpack_u32(submit.answer).tolist()[: submit.sampling.max_tokens])
    if submit.prediction is not None:
        from worker.scheduler.sequence import Prediction

        sequence.prediction = Prediction(unpack_u32(submit.prediction).tolist())
    if submit.sampling.chain is not None and submit.sampling.chain.mirostat:
        from worker.scheduler.sequence import begin

        begin(sequence)
    if submit.sampling.prompt_logprobs:
        from worker.scheduler.sequence import PromptScores

        sequence.scores = PromptScores(submit.scored_from)
    return sequence


# Estimates when a worker with a full queue can take requests again.

MAX_SECONDS = 120.0


class Backlog:
    """Estimates how long this worker needs for the tokens that its live requests still have to compute."""

    def __init__(self, scheduler: Scheduler, stats: Stats) -> None:
        self._scheduler, self._stats = scheduler, stats
        self._estimated, self._seconds = -1.0, 1.0  # the time of the last estimate, and its result

    def seconds(self, now: float) -> float:
        """Returns how many seconds, at least 1, the backlog takes at the measured speed. Computed once per `now`."""
        if self._estimated != now:
            live = self._scheduler.sequences()
            outputs = sum(sequence.sampling.max_tokens - sequence.output_len for sequence in live)
            tokens, speed = self._scheduler.status.waiting_tokens + outputs, self._stats.speed.per_second()
            self._estimated, self._seconds = now, min(MAX_SECONDS, max(1.0, tokens / speed)) if speed else 1.0
        return self._seconds
