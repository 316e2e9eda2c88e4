"""Which tokens are computed next, and what their results mean: `plan()` decides, the rest applies.

    submit(sequence, now)            -> waits, or Refused
    plan(now)                        -> Plan: who advances by how much, whose pages it may write
    commit(plan, ids, now)           -> list[Advance]: tokens, an end, or both, for each sequence that got some
    abort(key), expire(now), fail()  -> sequences leave early, their pages are free at once

Pure counting in plain ints: knows nothing of tensors, sockets or clocks (the caller passes `now`).

A step that raised needs no undoing: until commit() nothing counts as computed and nothing is published, and
pages acquired by plan() stay with their sequences, so the next plan() takes up the same work. A plan may also
be committed in parts, each a `Plan` of some of its chunks, to find out which sequence made a step fail.

Who wants to plan a step before it knows the ids of the last one takes commit() apart: launched(plan) when that step is
launched, update(plan, ids, now) when its ids are there, discard_in_flight() when they never will be.
"""

from collections.abc import Iterable
from math import inf

from shared.messages import PrefillBudget
from worker.kv_cache.pages import PagePool
from worker.schedule import policy
from worker.schedule.admission import QueueFull, Refused, TooLong, check_possible, check_room
from worker.schedule.plan import Advance, Chunk, Plan
from worker.schedule.planning import Planner
from worker.schedule.policy import SchedulerConfig
from worker.schedule.results import ResultApplier, check_ids
from worker.schedule.sequence import Key, Sequence
from worker.schedule.state import State

__all__ = ["Advance", "QueueFull", "Refused", "Scheduler", "SchedulerConfig", "TooLong"]


class Scheduler:
    """All sequences of one worker."""

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        self._config = config
        self._batching = policy.batching(config)
        self._state = State(config, pool, returns=config.prefix_cache and not self._batching.closed)
        self._pace = policy.step_time_policy(config)
        self._planner = Planner(self._state, self._batching, self._pace)
        self._settler = ResultApplier(self._state, self._pace)
        self._earliest = inf  # no live sequence's deadline is before

    # What there is

    @property
    def running(self) -> int:
        return len(self._state.running)

    @property
    def waiting(self) -> int:
        return len(self._state.queue)

    @property
    def waiting_tokens(self) -> int:
        return self._state.queue.tokens

    @property
    def max_seq_len(self) -> int:
        """Most tokens of one sequence."""
        return self._config.max_seq_len

    @property
    def has_work(self) -> bool:
        return bool(self._state.live)

    @property
    def preemptions_total(self) -> int:
        return self._state.preemptions_total

    @property
    def prefill_tokens_total(self) -> int:
        """Computed for prompts, and again for preempted sequences."""
        return self._settler.prefill_tokens

    @property
    def generation_tokens_total(self) -> int:
        return self._settler.generation_tokens

    @property
    def draft_tokens_total(self) -> int:
        return self._settler.draft_tokens

    @property
    def accepted_tokens_total(self) -> int:
        """Of those, how many were what came."""
        return self._settler.accepted_tokens

    @property
    def prefix_queries(self) -> int:
        """Tokens looked up in the prefix cache: those of a sequence each time it gets pages."""
        return self._state.paging.prefix.queries if self._state.paging.prefix else 0

    @property
    def prefix_hits(self) -> int:
        return self._state.paging.prefix.hits if self._state.paging.prefix else 0

    @property
    def pace(self) -> PrefillBudget:
        return self._pace.estimates

    def get(self, key: Key) -> Sequence | None:
        return self._state.live.get(key)

    def sequences(self) -> list[Sequence]:
        """All live sequences, in order of arrival."""
        return list(self._state.live.values())

    def next_wakeup(self, now: float) -> float:
        """When to expire() and plan() next if no message comes before: `now` or earlier is at once, inf is never."""
        if self._state.running or self._state.queue.resuming:
            return now
        opens = (
            self._batching.opens(now, self._state.queue.fresh, self._state.queue.oldest) if self._state.queue else inf
        )
        return min(opens, self._earliest)

    # Coming and going

    def submit(self, sequence: Sequence, now: float) -> None:
        """Takes a sequence in: it waits. Raises Refused, and takes nothing, if it cannot.

        A sequence may bring output already (a stream that goes on): it is computed over, not sampled again,
        and one whose output is complete ends without a new token.
        """
        if sequence.key in self._state.live:
            raise Refused(f"request {sequence.key[1]} is live already")
        check_possible(sequence, self._config, self._state.paging)
        if not sequence.resumed:  # it has been admitted once
            check_room(sequence, self._config, self._state.queue, len(self._state.running))
        self._earliest = min(self._earliest, sequence.deadline)
        self._state.live[sequence.key] = sequence
        self._state.queue.push(sequence, now)

    def abort(self, key: Key) -> Sequence | None:
        """Ends a sequence, waiting or running; None if there is none (any more)."""
        sequence = self._state.live.get(key)
        if sequence is not None:
            self._state.leave(sequence)
        return sequence

    def expire(self, now: float) -> list[Sequence]:
        """Ends and returns the sequences whose deadline has passed. Costs nothing while none has."""
        if now < self._earliest:
            return []
        late = [sequence for sequence in self._state.live.values() if sequence.deadline <= now]
        self.fail(late)
        self._earliest = min((sequence.deadline for sequence in self._state.live.values()), default=inf)
        return late

    def fail(self, sequences: Iterable[Sequence]) -> None:
        """Ends these; what they computed in committed steps stays cached, what a failed step wrote never is."""
        for sequence in sequences:
            if self._state.live.get(sequence.key) is sequence:
                self._state.leave(sequence)

    # A step

    def plan(self, now: float) -> Plan:
        """Decides the next step: decodes, then prompt chunks. Empty when there is nothing to compute yet.

        Where steps are under way it goes on from where they will have come.
        """
        return self._planner.plan(now)

    def commit(self, plan: Plan, ids: list[int], now: float) -> list[Advance]:
        """Applies a step that was computed: `ids[i]` was sampled for `plan.rows[i]`.

        Sequences that left since the plan was made are passed over. Raises ValueError, and applies nothing,
        if the ids do not fit the plan or the plan was committed before.
        """
        check_ids(plan, ids)
        self._settler.advance(plan)
        return self._settler.settle(plan, ids, now)

    def launched(self, plan: Plan) -> None:
        """A step was launched. Raises ValueError, and applies nothing, if it does not go on from the last one."""
        self._settler.advance(plan)

    def update(self, plan: Plan, ids: list[int], now: float) -> list[Advance]:
        """The ids of the first of the launched steps are there; otherwise as commit()."""
        return self._settler.settle(plan, ids, now)

    def discard_in_flight(self) -> None:
        """No launched step will be settled: the next plan() takes up their work again."""
        self._settler.abandon()

    def current(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Those of an abandoned step that can be tried again: as they are, but without drafts."""
        return self._settler.current(chunks)

    def check(self) -> None:
        """Raises AssertionError unless pages, queue and sequences agree; for tests and idle moments."""
        self._state.check()
