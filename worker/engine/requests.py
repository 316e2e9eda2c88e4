"""Turns frontends' messages into scheduler calls, and what came of them into messages.

Keeps every request from its Submit to its one End, and KEEP_S longer, so that a frontend that lost a frame can ask for
its output again. Computes nothing. What a turn has to tell each frontend is collected in a Frame and sent once.
"""

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field

from shared import messages as m
from shared.codec import unpack_u32
from worker.engine.crash_journal import CrashJournal
from worker.engine.step_builder import StepBuilder
from worker.engine.validation import check_submit
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.pending import PendingGrammars
from worker.observability.metrics import Metrics
from worker.observability.stats import Stats
from worker.schedule.admission import Refused
from worker.schedule.scheduler import Scheduler
from worker.schedule.sequence import Key, Sequence
from worker.transport.server import FrontendGone, WireServer

KEEP_FINISHED_S = 30.0  # how long a finished request's output can still be asked for
LONGEST_WAIT_S = 120.0  # that a client is told to wait
QUARANTINE = 2  # a request that was in the step of this many crashes, without progress, is not tried again
MAX_COMPILING = 256  # requests that wait for their grammars


@dataclass(slots=True)
class Record:
    """A request as its frontend knows it; kept a while after its end."""

    sequence: Sequence
    end: m.End | None = None
    logprobs: list[m.Logprobs] = field(default_factory=list)


class RequestTable:
    """`now` is the loop's clock, in seconds, everywhere."""

    def __init__(
        self,
        scheduler: Scheduler,
        stats: Stats,
        metrics: Metrics,
        *,
        vocab_size: int,
        seeds: random.Random,
        crash_journal: CrashJournal | None = None,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        self.draining = False
        self.crash_journal = crash_journal or CrashJournal()
        self._scheduler = scheduler
        self._stats = stats
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._backlog = (-1.0, 1.0)  # when it was computed last, and how many seconds it would take
        self._seeds = seeds
        self._compiler = compiler
        self._compiling = PendingGrammars()
        self._records: dict[Key, Record] = {}
        self._ended: deque[tuple[float, Key]] = deque()
        self._frames: defaultdict[bytes, StepBuilder] = defaultdict(StepBuilder)

    # what frontends say

    def receive(self, inbox: deque[tuple[bytes, m.Request | FrontendGone]], now: float) -> None:
        """Takes what is in the inbox now, queues requests whose grammars are ready, ends those that are too late."""
        for _ in range(len(inbox)):  # what comes meanwhile waits for the next turn
            sender, request = inbox.popleft()
            match request:
                case m.Submit():
                    self._submit(sender, request, now)
                case m.Abort():
                    for key in self._own(sender, request.ids):
                        self._abort(key, now)
                case m.Resync():
                    self._resync(sender, request.id, request.offset)
                case m.Lease():
                    self._disown(sender, request, now)
                case FrontendGone():
                    for key in [key for key in (*self._records, *self._compiling) if key[0] == sender]:
                        self._abort(key, now)
                        self._records.pop(key, None)
                    self._frames.pop(sender, None)  # if it comes back, it shall ask again and not hear of aborts
        if self._compiling:
            self._compiled(now)
        for sequence in self._scheduler.expire(now):
            self.end(sequence, m.Outcome.DEADLINE, now, "the deadline passed")

    def _own(self, sender: bytes, ids: tuple[int, ...]) -> list[Key]:
        """Keys of these ids; of a list longer than all requests here only those that are known."""
        if len(ids) <= len(self._records) + len(self._compiling):
            return [(sender, id) for id in ids]
        wanted = frozenset(ids)
        return [key for key in (*self._records, *self._compiling) if key[0] == sender and key[1] in wanted]

    def _submit(self, sender: bytes, submit: m.Submit, now: float) -> None:
        key = (sender, submit.id)
        known = self._records.get(key)
        if known is not None:  # said twice, as the answer was lost
            self._resync(sender, submit.id, len(submit.generated) // 4)
            return
        if key in self._compiling:  # said twice; the answer will come
            return
        crash_count = self.crash_journal.crash_count((sender, submit.original_id or submit.id), submit.crashes)
        refusal = self._refusal(submit, crash_count)
        if refusal is None:
            sequence = self._sequence(key, submit, now)
            sequence.crashes, sequence.resumed = crash_count, submit.crashes > 0
            refusal = self._compile(sequence) if submit.sampling.grammar else self._enqueue(sequence, now)
        if refusal is not None:
            self._reject(sender, refusal)

    def _compile(self, sequence: Sequence) -> m.Rejected | None:
        """Has its grammar compiled. Until that is done it is neither admitted nor rejected."""
        id = sequence.key[1]
        if self._compiler is None:
            return m.Rejected(id, m.Refusal.INVALID, "this worker knows no vocabulary to hold to a grammar")
        if len(self._compiling) >= MAX_COMPILING and not sequence.resumed:
            return m.Rejected(id, m.Refusal.QUEUE_FULL, f"{MAX_COMPILING} grammars are being compiled", 1.0)
        self._compiling.add(sequence, self._compiler.compile(sequence.sampling.grammar))
        return None

    def _compiled(self, now: float) -> None:
        """Queues those whose grammars have become ready; ends those that came too late."""
        for sequence in self._compiling.expire(now):
            self._end_unqueued(sequence, m.Outcome.DEADLINE, now, "the deadline passed")
        for sequence, wrong in self._compiling.take_ready():
            sender, id = sequence.key
            invalid = m.Rejected(id, m.Refusal.INVALID, wrong) if wrong else None
            refusal = invalid or self._closed(id) or self._enqueue(sequence, now)
            if refusal is not None:
                self._reject(sender, refusal)

    def _end_unqueued(self, sequence: Sequence, outcome: m.Outcome, now: float, error: str = "") -> None:
        """Admitted and ended at once."""
        sender, id = sequence.key
        self._records[sequence.key] = Record(sequence)
        self._frames[sender].admitted.append(m.Admitted(id, sequence.seed))
        self.end(sequence, outcome, now, error)

    def _reject(self, sender: bytes, refusal: m.Rejected) -> None:
        self._metrics.rejected(refusal.reason)
        self._frames[sender].rejected.append(refusal)

    def _refusal(self, submit: m.Submit, crash_count: int) -> m.Rejected | None:
        if closed := self._closed(submit.id):
            return closed
        if crash_count >= QUARANTINE:
            return m.Rejected(submit.id, m.Refusal.INVALID, f"quarantined: in flight in {crash_count} worker crashes")
        longest = self._scheduler.config.max_seq_len
        if len(submit.prompt) + len(submit.generated) > 4 * longest:  # bytes
            return m.Rejected(submit.id, m.Refusal.TOO_LONG, f"more than {longest} tokens")
        wrong = check_submit(submit, self._vocab_size)
        return m.Rejected(submit.id, m.Refusal.INVALID, wrong) if wrong else None

    def _closed(self, id: int) -> m.Rejected | None:
        return m.Rejected(id, m.Refusal.DRAINING, "the server is shutting down", 5.0) if self.draining else None

    def _sequence(self, key: Key, submit: m.Submit, now: float) -> Sequence:
        prompt = unpack_u32(submit.prompt).tolist()
        sampling = submit.sampling
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        return Sequence(
            key,
            prompt + unpack_u32(submit.generated).tolist(),
            len(prompt),
            sampling,
            seed,
            now,
            cache_salt=submit.cache_salt,
            group=submit.group,
            priority=submit.priority,
            deadline=now + submit.deadline_ms / 1e3 if submit.deadline_ms else float("inf"),
            tenant=submit.tenant,
            original_id=submit.original_id,
        )

    def _enqueue(self, sequence: Sequence, now: float) -> m.Rejected | None:
        sender, id = sequence.key
        try:
            self._scheduler.submit(sequence, now)
        except Refused as refused:
            full = refused.reason is m.Refusal.QUEUE_FULL
            return m.Rejected(id, refused.reason, str(refused), self._retry_after(now) if full else 0.0)
        self._records[sequence.key] = Record(sequence)
        self._frames[sender].admitted.append(m.Admitted(id, sequence.seed))
        return None

    def _retry_after(self, now: float) -> float:
        """Seconds until the present backlog is computed at the measured speed; at least one. Computed once a turn."""
        at, seconds = self._backlog
        if at != now:
            live = self._scheduler.sequences()
            outputs = sum(sequence.sampling.max_tokens - sequence.output_len for sequence in live)
            backlog = self._scheduler.status.waiting_tokens + outputs
            speed = self._stats.speed.per_second()
            seconds = min(LONGEST_WAIT_S, max(1.0, backlog / speed)) if speed else 1.0
            self._backlog = now, seconds
        return seconds

    def _abort(self, key: Key, now: float) -> None:
        sequence = self._scheduler.abort(key)
        if sequence is not None:
            self.end(sequence, m.Outcome.ABORTED, now)
        elif unqueued := self._compiling.remove(key):
            self._end_unqueued(unqueued, m.Outcome.ABORTED, now)

    def _disown(self, sender: bytes, lease: m.Lease, now: float) -> None:
        """End what its frontend no longer has: the Abort was lost, or overtook the Submit."""
        owned = {*unpack_u32(lease.ids)}  # of the ids up to lease.last_id; ids are 32-bit numbers that wrap around
        live = [id for (who, id), record in self._records.items() if who == sender and record.end is None]
        for id in [*live, *(id for who, id in self._compiling if who == sender)]:
            if id not in owned and (lease.last_id - id) % (1 << 32) < 1 << 31:
                self._abort((sender, id), now)

    def _resync(self, sender: bytes, id: int, have: int) -> None:
        """Everything from `have` on, its end included."""
        if (sender, id) in self._compiling:  # nothing was said of it yet
            return
        record = self._records.get((sender, id))
        frame = self._frames[sender]
        if id in frame.repaired:
            return
        frame.repaired.add(id)
        if record is None:
            frame.unknown.append(id)
            return
        sequence = record.sequence
        frame.admitted.append(m.Admitted(id, sequence.seed))
        frame.logprobs += [lp for lp in record.logprobs if lp.prompt or lp.start + len(lp.chosen) // 4 > have]
        frame.add(id, have, sequence.tokens[sequence.prompt_len + have :])
        if record.end is not None:
            frame.ends.append(record.end)

    # what they are told

    def tokens(self, sequence: Sequence, tokens: list[int]) -> None:
        """Those at the end of `sequence.tokens`."""
        sender, id = sequence.key
        frame = self._frames[sender]
        frame.add(id, sequence.output_len - len(tokens), tokens)
        if not sequence.last_token:
            frame.started.append(m.Started(id, _timings(sequence, sequence.first_token)))

    def logprobs(self, sequence: Sequence, logprobs: m.Logprobs) -> None:
        """Those of a step's tokens; before the tokens themselves."""
        record = self._records.get(sequence.key)
        if record is not None:
            record.logprobs.append(logprobs)
            self._frames[sequence.key[0]].logprobs.append(logprobs)

    def end(self, sequence: Sequence, outcome: m.Outcome, now: float, error: str = "") -> None:
        """Once; later calls change nothing."""
        sender, id = sequence.key
        record = self._records.get(sequence.key)
        if record is None or record.end is not None:
            return
        record.end = m.End(id, outcome, sequence.output_len, error, _timings(sequence, now))
        self._frames[sender].ends.append(record.end)
        self._ended.append((now, sequence.key))
        self._metrics.ended(outcome, sequence, now)
        if outcome in (m.Outcome.EOS, m.Outcome.STOP, m.Outcome.LENGTH):
            self._stats.e2e.add(now - sequence.arrival)

    def end_all(self, outcome: m.Outcome, now: float, error: str) -> None:
        """Every request that has not ended; those that were not admitted yet are refused."""
        for record in [record for record in self._records.values() if record.end is None]:
            self._scheduler.abort(record.sequence.key)
            self.end(record.sequence, outcome, now, error)
        for sender, id in list(self._compiling):
            self._compiling.remove((sender, id))
            self._reject(sender, m.Rejected(id, m.Refusal.DRAINING, error, 5.0))

    def publish(self, link: WireServer, now: float) -> None:
        """Send what this turn has to say and forget what nobody will ask for any more."""
        while self._ended and self._ended[0][0] < now - KEEP_FINISHED_S:
            self._records.pop(self._ended.popleft()[1], None)
        if not self._frames:
            return
        for sender, frame in self._frames.items():
            link.publish(sender, frame.step())
        self._frames.clear()
        link.flush()


def _timings(sequence: Sequence, now: float) -> m.Timings:
    admitted = sequence.admitted or now
    first = sequence.first_token or now
    return m.Timings(
        queue_ms=1e3 * (admitted - sequence.arrival),
        prefill_ms=1e3 * (first - admitted),
        decode_ms=1e3 * (now - first),
        cached_tokens=sequence.cached_tokens,
    )
