"""The scheduler: decides which tokens the next step computes, and applies the results of steps.

    submit(sequence, now)       adds a sequence to the queue; raises Refused
    plan(now)                   decides the next step: which sequences compute how many tokens
    launched(plan)              notes that the step is in flight, so that the next plan() continues from there
    update(plan, ids, now)      applies the sampled ids: adds tokens, ends sequences, publishes full pages
    abort(key), expire(now)     remove sequences early; their pages are free at once
    discard_in_flight()         forgets the steps in flight, as if they had not been launched

The scheduler counts in plain ints and knows nothing about tensors, sockets or clocks (the caller passes `now`).
planner.py decides the contents of a step; this module tracks the steps in flight and applies their results.

A plan may be made while steps are in flight. It continues from the positions that the steps in flight will reach. It
may contain a token whose id the host does not know yet, because the device will know the id in time. Nothing is
planned beyond a length that ends the sequence. If an id in flight turns out to be an eos, update() sees it later, and
at worst one row was computed in vain.

After a step that raised, nothing has to be undone. plan() does not change the counts of computed tokens, pages are not
published before update(), and sequences keep their pages, so the next plan() contains the same work. To find out which
sequence made a step fail, the step may also be repeated in parts: each part is a `Plan` with some of the chunks.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import islice
from math import inf

from shared.messages import Outcome
from worker.kv_cache.pages import PagePool
from worker.schedule.admission import Refused, check_possible, check_queue
from worker.schedule.features.drafts import accepted_ids, without_drafts
from worker.schedule.features.features import speculation_of, states_of
from worker.schedule.planner import Planner
from worker.schedule.policy import SchedulerConfig, batching_policy
from worker.schedule.records.constraint import accept
from worker.schedule.sequence import Chunk, Key, Plan, Sequence, SequenceUpdate
from worker.schedule.state import SchedulerState, SchedulerStatus


class Scheduler:
    """Schedules all sequences of one worker."""

    def __init__(self, config: SchedulerConfig, pools: Seq[PagePool], slots: PagePool | None = None) -> None:
        """pools: one for each group of layers (worker/kv_cache/groups.py).

        slots: the pool of slots for recurrent states; None if no layer has a recurrent state.
        """
        self.config = config
        self._batching = batching_policy(config)
        self._states = states_of(config, slots, pools[0].page_size)
        self.speculation = speculation_of(config, self._states)
        reuses_pages = config.prefix_cache and not self._batching.closed
        self.state = SchedulerState(config, pools, self._states, reuses_pages=reuses_pages)
        self._planner = Planner(config, self.state, self._batching, self._states, self.speculation)
        self._step_time = self._planner.step_time
        self._earliest_deadline = inf  # no live sequence has an earlier deadline
        self._prefix_cache_reset = 0  # the nonce of the latest reset
        self._prefill_tokens = 0
        self._generation_tokens = 0

    # Queries

    @property
    def status(self) -> SchedulerStatus:
        state, prefix, speculation = self.state, self.state.paging.prefix, self.speculation
        return SchedulerStatus(
            running=len(state.running),
            waiting=len(state.queue),
            waiting_tokens=state.queue.tokens,
            preemptions=state.preemptions,
            prefill_tokens=self._prefill_tokens,
            generation_tokens=self._generation_tokens,
            draft_tokens=speculation.draft_tokens if speculation else 0,
            accepted_tokens=speculation.accepted_tokens if speculation else 0,
            prefix_queries=prefix.queries if prefix else 0,
            prefix_hits=prefix.hits if prefix else 0,
            prefill_budget=self._step_time.estimates,
            prefix_cache_reset=self._prefix_cache_reset,
        )

    @property
    def has_work(self) -> bool:
        return bool(self.state.live)

    def sequences(self) -> list[Sequence]:
        """Returns all live sequences, in order of arrival."""
        return list(self.state.live.values())

    def next_wakeup(self, now: float) -> float:
        """Returns when to call expire() and plan() next if no message arrives before that.

        `now` or earlier means at once, and inf means never.
        """
        queue = self.state.queue
        if self.state.running or queue.preempted:
            return now
        opens = self._batching.opens(now, queue.fresh, queue.oldest) if queue else inf
        return min(opens, self._earliest_deadline)

    def reset_prefix_cache(self, nonce: int) -> None:
        """Empties the prefix cache. The status then shows the nonce, so that the caller knows it is done."""
        self.state.paging.clear_prefixes()
        self._prefix_cache_reset = nonce

    # Sequences come and go

    def submit(self, sequence: Sequence, now: float) -> None:
        """Adds a sequence to the queue. Raises Refused and changes nothing if it cannot be accepted.

        A resumed sequence comes with its output so far. The K/V of this output is computed again, but its ids are not
        sampled again. If the output is complete, the sequence ends without a new token.
        """
        if sequence.key in self.state.live:
            raise Refused(f"request id {sequence.key[1]} is in use already")
        check_possible(sequence, self.config, self.state.paging)
        if not sequence.history.resumed:  # a resumed sequence was admitted before
            check_queue(sequence, self.config, self.state.queue, len(self.state.running))
        self._earliest_deadline = min(self._earliest_deadline, sequence.turn.deadline)
        self.state.live[sequence.key] = sequence
        self.state.queue.push(sequence, now)

    def abort(self, key: Key) -> Sequence | None:
        """Ends a waiting or running sequence and returns it. Returns None if no live sequence has this key.

        Full pages that update() has published stay cached. Pages that a failed step wrote are never published.
        """
        sequence = self.state.live.get(key)
        if sequence is not None:
            self._leave(sequence)
        return sequence

    def fail(self, sequence: Sequence) -> None:
        """Ends a sequence whose step failed, unless it has left already."""
        if self.state.live.get(sequence.key) is sequence:
            self._leave(sequence)

    def expire(self, now: float) -> list[Sequence]:
        """Ends and returns the sequences whose deadlines have passed. Costs nothing before the earliest deadline."""
        if now < self._earliest_deadline:
            return []
        expired = [sequence for sequence in self.state.live.values() if sequence.turn.deadline <= now]
        for sequence in expired:
            self._leave(sequence)
        self._earliest_deadline = min((sequence.turn.deadline for sequence in self.state.live.values()), default=inf)
        return expired

    # The next step

    def plan(self, now: float) -> Plan:
        """Decides the next step: decodes, then prompt chunks. The plan is empty if there is nothing to compute yet."""
        return self._planner.plan(now)

    # The results of a step

    def launched(self, plan: Plan) -> None:
        """Notes that a step is in flight.

        Raises ValueError and changes nothing if the step does not continue where the last one ended.
        """
        chunks = [chunk for chunk in plan.chunks if chunk.sequence in self.state.running]
        for chunk in chunks:
            if chunk.start != chunk.sequence.computed_tokens + chunk.sequence.in_flight_tokens:
                raise ValueError(f"{chunk.sequence.key} has moved on since this plan was made")
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.in_flight_tokens += chunk.length
            sequence.pending_outputs += chunk.samples
            if self._states is not None:
                self._states.launched(sequence, chunk.start + chunk.length)
        self._step_time.launched(len(plan.chunks))

    def update(self, plan: Plan, ids: list[int], now: float) -> list[SequenceUpdate]:
        """Applies the results of a step: `ids[i]` was sampled for `plan.rows[i]`. Call it in the order of launches.

        Skips sequences that have left or were preempted since the plan was made. Raises ValueError and changes nothing
        if the number of ids does not fit the plan.
        """
        rows = sum([chunk.samples + len(chunk.drafts) for chunk in plan.chunks])
        if rows != len(ids):
            raise ValueError(f"the plan samples {rows} tokens, but {len(ids)} ids were passed")
        self._step_time.computed(now)
        updates: list[SequenceUpdate] = []
        sampled = iter(ids)
        for chunk in plan.chunks:
            own = [next(sampled)] if chunk.samples else []
            if chunk.drafts:
                own = accepted_ids([*own, *islice(sampled, len(chunk.drafts))], chunk.drafts)
            if self.state.is_outdated(chunk):
                continue  # the sequence has left, or was preempted (and may run again)
            update = self._apply(chunk, own, now)
            if update is not None:
                updates.append(update)
        # Output that is compared with an answer counts as prompt tokens. _count_drafts() has counted the drafts.
        self._generation_tokens += sum([chunk.samples for chunk in plan.chunks if chunk.sequence.check is None])
        return updates

    def _apply(self, chunk: Chunk, ids: list[int], now: float) -> SequenceUpdate | None:
        """Applies the result of one chunk: its sampled ids. Returns None if the prompt is not complete yet."""
        sequence = chunk.sequence
        outcome = self._add(sequence, ids)
        self._mark_computed(chunk, chunk.rows - len(ids) if chunk.drafts else 0)
        if ids:
            sequence.history.first_token = sequence.history.first_token or now
        elif outcome is None:
            if sequence.computed_tokens < len(sequence.tokens):
                return None
            outcome = self.state.outcome(sequence)
        if outcome is not None:
            self._leave(sequence)
        return SequenceUpdate(sequence, ids, outcome)

    def _add(self, sequence: Sequence, ids: list[int]) -> Outcome | None:
        """Adds sampled ids to a sequence until one ends it, and deletes the rest from `ids`. Returns the outcome."""
        for count, id in enumerate(ids):
            if sequence.constraint is not None and not accept(sequence, sequence.constraint, id):
                del ids[count:]
                return Outcome.DEAD_END
            sequence.tokens.append(id)
            outcome = self.state.outcome(sequence)
            if outcome is not None:
                del ids[count + 1 :]
                return outcome
        return None

    def _mark_computed(self, chunk: Chunk, rejected: int) -> None:
        """Counts the chunk's tokens, except its last `rejected` drafts, as computed; publishes and frees pages."""
        sequence, start, paging = chunk.sequence, chunk.start, self.state.paging
        end = start if rejected and self._states is not None else start + chunk.length - rejected
        sequence.computed_tokens = end
        sequence.in_flight_tokens -= chunk.length
        sequence.pending_outputs -= chunk.samples
        if start // paging.page_size != end // paging.page_size:
            paging.publish(sequence, start, end)
            paging.return_behind(sequence)
        if self._states is not None:  # after a rejected draft, the sequence keeps the state from before the chunk
            self._states.computed(sequence, start, start + chunk.length)
        if chunk.drafts or sequence.check is not None:
            self._count_drafts(chunk, rejected)
        elif chunk.length > 1 or start < sequence.prompt_len:
            self._prefill_tokens += chunk.length
        if sequence.turn.group and end >= sequence.prompt_len and sequence.uncomputed_tokens <= 1:
            self.state.queue.release_group(sequence)

    def _count_drafts(self, chunk: Chunk, rejected: int) -> None:
        """Counts the drafts of a chunk: as prompt tokens if they belong to an answer check, else as generated ones."""
        accepted = len(chunk.drafts) - rejected
        if chunk.sequence.check is not None:
            self._prefill_tokens += chunk.length - rejected
        elif self.speculation is not None:
            self._generation_tokens += accepted
            self.speculation.record(chunk, accepted)

    # When a step has failed

    def discard_in_flight(self) -> None:
        """Forgets the launched steps, for which update() will not be called. The next plan() repeats their work."""
        self._step_time.discarded()
        self.state.outdated.clear()
        for sequence in self.state.running:
            sequence.in_flight_tokens = sequence.pending_outputs = 0
            if self._states is not None:
                self._states.discard(sequence)

    def retryable(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Returns those chunks of a discarded step that can be computed again, and removes their drafts."""
        running = self.state.running
        left = [chunk for chunk in chunks if chunk.sequence in running]
        again = [chunk for chunk in left if chunk.sequence.computed_tokens == chunk.start]
        return [without_drafts(chunk, self.speculation) if chunk.drafts else chunk for chunk in again]

    def _leave(self, sequence: Sequence) -> None:
        self.state.leave(sequence)
        if self.speculation is not None:
            self.speculation.forget(sequence)

    def check(self) -> None:
        """Raises AssertionError unless pages, queue and sequences agree; for tests and idle moments."""
        self.state.check()
