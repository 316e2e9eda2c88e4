"""The scheduler: decides which tokens the next step computes, and applies the results of steps.

    submit(sequence, now)       adds a sequence to the queue; raises Refused
    plan(now)                   decides the next step: which sequences compute how many tokens
    launched(plan)              notes that the step is in flight, so that the next plan() continues from there
    update(plan, ids, now)      applies the sampled ids: adds tokens, ends sequences, publishes full pages
    abort(key), expire(now)     remove sequences early; their pages are free immediately
    discard_in_flight()         forgets the steps in flight, as if they had not been launched

The scheduler counts in plain ints and knows nothing about tensors, sockets or clocks (the caller passes `now`).
Planner decides the contents of a step; Scheduler tracks the steps in flight and applies their results.

A plan may be made while steps are in flight. It continues from the positions that the steps in flight will reach. It
may contain a token whose id the host does not know yet, because the device will know the id in time. Nothing is
planned beyond a length that ends the sequence. If an id in flight turns out to be an eos, update() sees it later, and
at worst one row was computed in vain.

After a step that raised, nothing has to be undone. plan() does not change the counts of computed tokens, pages are not
published before update(), and sequences keep their pages, so the next plan() contains the same work. To find out which
sequence made a step fail, the step may also be repeated in parts: each part is a `Plan` with some of the chunks.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from shared.messages import Outcome
from worker.kv_cache.pages import PagePool
from worker.scheduler.host_budget import HostBudget, drafts_host_s
from worker.scheduler.policy import (
    BatchingPolicy,
    SchedulerConfig,
    batching_policy,
    chunk_policy,
    order_policy,
    step_time_policy,
    step_time_target,
)
from worker.scheduler.queue import Refused, WaitingQueue, check_possible, check_queue
from worker.scheduler.sequence import Chunk, Key, Plan, Sequence, SequenceUpdate, accept, accepted_ids, without_drafts
from worker.scheduler.state import SchedulerState, SchedulerStatus
from worker.scheduler.step_time import StepTimePolicy
from worker.scheduler.tenant_shares import TenantShares

if TYPE_CHECKING:
    from worker.kv_cache.store import KvStore
    from worker.scheduler.drafts import Speculation
    from worker.scheduler.fetching import Fetching
    from worker.scheduler.pipeline import StageShares
    from worker.scheduler.recurrent_slots import States


class Scheduler:
    """Schedules all sequences of one worker."""

    def __init__(self, config: SchedulerConfig, pools: Seq[PagePool], slots: PagePool | None = None) -> None:
        """pools: one for each group of layers (worker/kv_cache/tensors.py).

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
        fetching = state.paging.fetching
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
            prefix_cache_reset=self._prefix_cache_reset if fetching is None else fetching.confirmed_reset,
        )

    @property
    def has_work(self) -> bool:
        return bool(self.state.live)

    @property
    def masked(self) -> list[Sequence]:
        """The sequences whose masks are computed outside of the step that was planned last."""
        return self._planner.host.masked

    def sequences(self) -> list[Sequence]:
        """Returns all live sequences, in order of arrival."""
        return list(self.state.live.values())

    def next_wakeup(self, now: float) -> float:
        """Returns when to call expire() and plan() next if no message arrives before that.

        `now` or earlier means immediately, and inf means never.
        """
        queue, running, fetching = self.state.queue, self.state.running, self.state.paging.fetching
        # a mask or pages that have come wake the loop
        waiting = len(self.masked) + (0 if fetching is None else fetching.waiting)
        if waiting and len(running) == waiting and not queue.preempted:
            deadlines = [self._earliest_deadline] + ([] if fetching is None else [fetching.next_deadline])
            return now if fetching is not None and fetching.ready else min(deadlines)
        if running or queue.preempted:
            return now
        opens = self._batching.opens(now, queue.fresh, queue.oldest) if queue else inf
        return min(opens, self._earliest_deadline)

    def reset_prefix_cache(self, nonce: int) -> None:
        """Empties the prefix cache and the K/V store, and forgets the texts that drafts are taken from.

        The status then shows the nonce, so that the caller knows that all this is done.
        """
        fetching = self.state.paging.fetching
        if fetching is not None and not fetching.reset(nonce):
            return  # the caller asks again about a reset that is not done yet
        self.state.paging.clear_prefixes()
        if self.speculation is not None and self.speculation.texts is not None:
            self.speculation.texts.clear()
        self._prefix_cache_reset = nonce

    def use_store(self, store: "KvStore") -> "Fetching":
        """Keeps pages in a K/V store from now on, and fetches them from there."""
        from worker.scheduler.fetching import Fetching

        return Fetching(store, self.state.paging, self._states, lambda: self._step_time.estimates.prompt_token_s)

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
        self._planner.host.entered(sequence)
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
        has_drafts = rows > len(plan.chunks)
        seconds = self._step_time.computed(now, drafts_host_s(plan.chunks) if has_drafts else 0.0)
        if seconds is not None and not has_drafts:
            self._planner.host.computed(seconds, plan.chunks)
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


# Plans the next step: which sequences compute how many tokens.
#
# - A prompt gets all its pages when it joins, not chunk by chunk. Half-computed prompts therefore never wait for each
#   other's pages, and admission is one comparison. Only layers with a sliding window get pages chunk by chunk, because
#   each chunk frees as many pages behind the window (paging.py).
# - Running sequences get the pages to grow before anything else in a step, from the oldest sequence to the newest. If
#   no page is free, the newest sequence is preempted. The oldest sequence therefore always advances.


class Planner:
    """Plans steps by the policies of `config`. While planning, it gives pages to sequences, admits and preempts them.

    states: None if no layer has a recurrent state; speculation: None if decodes have no drafts.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        state: SchedulerState,
        batching: BatchingPolicy,
        states: "States | None" = None,
        speculation: "Speculation | None" = None,
    ) -> None:
        self.step_time = step_time_policy(config)
        self._config, self._state = config, state
        self._states, self._speculation = states, speculation
        self._stages = stages_of(config, state.running, state.queue, self.step_time, state.paging.most_in_flight)
        self._batching = batching
        self._chunking = chunk_policy(config)
        self._order = order_policy(config)
        self.host = HostBudget(config.cpu_vocab_size)
        self._shares = TenantShares(step_time_target(config), self.step_time, state.queue.tenants, state.running.keys())

    def plan(self, now: float) -> Plan:
        """Decides the next step: decodes, then prompt chunks. The plan is empty if there is nothing to compute yet."""
        plan = Plan()
        if self._state.paging.fetching is not None:
            self._state.paging.fetching.advance(now)
        admit_starved(self._state, self._config.max_batch_size, plan.preempted, now)
        decodes, prompts = self._running_work(plan.preempted, now)
        in_host_time = self.host.affordable(decodes, self._state.running)
        decodes = self._shares.affordable(in_host_time, prompts)
        budget, limits = self._config.max_step_tokens, self._stages or self.step_time
        reserved = min(len(decodes), self._order.reserve(budget))
        count, least = len(decodes) or int(self._shares.crowded), self._shares.least_prompts
        prefill_budget = min(budget - reserved, limits.prefill_budget(count, least))
        self._shares.share_prompts(prefill_budget)
        prefills = self._prefill_chunks(prompts, prefill_budget, now, admit=not plan.preempted)
        prefill_tokens = sum(chunk.length for chunk in prefills)
        served = self._order.arrange(decodes)[: max(reserved, budget - prefill_tokens)]
        self._order.served(len(served), len(decodes))
        plan.chunks.extend(self._decode_chunks(served))
        plan.chunks.extend(prefills)
        if self._speculation is not None and self._speculation.may_draft(prefills):
            prefill_tokens = 0
            plan.chunks[:] = self._speculation.add_drafts(
                plan.chunks, self.step_time.row_cost, crowded=self.host.crowded, most=self._shares.most
            )
        self.step_time.planned(now, len(plan.chunks), plan.tokens - prefill_tokens, prefill_tokens)
        return plan

    def _running_work(self, preempted: list[Sequence], now: float) -> tuple[list[Sequence], list[Sequence]]:
        """Divides the running sequences into decodes (one uncomputed token) and prompts, and gives pages to them.

        Each decode has a page for its token, and the prompts that may be in this step have pages for their chunks.
        Skips sequences whose last token is in flight, and sequences with drafts in flight, whose length is unknown.
        """
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        running, budget = self._state.running, self._config.max_step_tokens
        for sequence in list(running):
            if (preempted and sequence not in running) or (self._stages and not self._stages.may_plan(sequence)):
                continue
            if sequence.fetch is not None:
                continue
            start = sequence.computed_tokens + sequence.in_flight_tokens
            length = len(sequence.tokens) + sequence.pending_outputs
            if sequence.check is not None:
                if sequence.pending_outputs:  # the id in flight decides whether there is a next token
                    continue
                length = sequence.known_len
            if length - start > 1 or sequence.check is not None:
                if sequence.capacity < length:  # layers with a window did not get pages for the whole prompt
                    chunk = self._length(sequence, start, length - start, budget, inf)
                    budget -= chunk
                    end = start + chunk
                    if sequence.capacity < end and not self._add_pages(sequence, end, preempted, now):
                        continue
                prompts.append(sequence)
            elif length <= start or (sequence.pending_outputs and self._state.at_max_length(sequence, length)):
                continue
            elif start < sequence.capacity or self._add_pages(sequence, start + 1, preempted, now):
                decodes.append(sequence)
        return self._stages.share_of(decodes) if self._stages else decodes, prompts

    def _add_pages(self, sequence: Sequence, end: int, preempted: list[Sequence], now: float) -> bool:
        """Gives a sequence pages for its first `end` tokens, and preempts the newest sequences if necessary.

        Returns False if the sequence itself was preempted.
        """
        while not self._state.paging.grow(sequence, end):
            newest = next(reversed(self._state.running))
            self._state.preempt(newest, now)
            preempted.append(newest)
            if newest is sequence:
                return False
        return True

    def _decode_chunks(self, decodes: list[Sequence]) -> list[Chunk]:
        outcome = self._state.outcome
        return [
            # If the token is the last of a prompt and max_tokens is 0, nothing is sampled.
            Chunk(
                sequence,
                sequence.computed_tokens + sequence.in_flight_tokens,
                1,
                sequence.history.first_token != 0.0 or sequence.pending_outputs > 0 or outcome(sequence) is None,
            )
            for sequence in decodes
        ]

    def _prefill_chunks(self, prompts: list[Sequence], budget: int, now: float, *, admit: bool) -> list[Chunk]:
        """Returns the chunks of running prompts, then those of sequences that join now."""
        chunks: list[Chunk] = []
        state, queue = self._state, self._state.queue
        limit = self._config.max_prefill_chunks_per_step or inf
        state.prefix_waits.begin_plan()
        for sequence in prompts:
            budget -= self._add_prefill(sequence, budget, chunks, limit)
        if not admit or not queue:
            return chunks
        queue.tenants.charge_running()
        places = self._batching.places(now, len(state.running), queue.preempted, queue.fresh, queue.oldest)
        while places > 0 and (self._batching.closed or (budget > 0 and len(chunks) < limit)):
            head = queue.head
            if head is None or not state.join(head, now):
                break
            places -= 1
            budget -= self._add_prefill(head, budget, chunks, limit)
        return chunks

    def _add_prefill(self, sequence: Sequence, budget: int, chunks: list[Chunk], limit: float) -> int:
        """Appends the next prompt chunk of a sequence if it fits in the step. Returns its length, or 0."""
        budget = int(min(budget, self._shares.left(sequence)))
        if budget > 0 and self._state.prefix_waits.waits(sequence):
            return 0
        start = sequence.computed_tokens + sequence.in_flight_tokens
        known, samples = len(sequence.tokens) - start, self._state.outcome(sequence) is None
        drafts = sequence.check.drafts(sequence.output_len) if sequence.check is not None and samples else ()
        most = budget if chunks else inf
        length = self._length(sequence, start, known + len(drafts), budget, most) if len(chunks) < limit else 0
        length = self.host.fitting(sequence, length, known, samples=samples)
        # A prompt that waits leaves more of the step to this one than _running_work() gave pages for.
        if sequence.capacity < start + length and not self._state.paging.grow(sequence, start + length):
            return 0
        if length:
            self._shares.count(sequence, length)
            chunks.append(Chunk(sequence, start, length, samples and length >= known, drafts[: max(0, length - known)]))
        return length

    def _length(self, sequence: Sequence, start: int, remaining: int, budget: int, most: float) -> int:
        """Returns the length of the next chunk. It does not pass the next position where a state is to be published.

        most: the longest rest of an image that a chunk may compute to keep it whole; may be more than the budget
        """
        checkpoint = self._states.next_checkpoint(sequence, start) if self._states is not None else 0
        length = self._chunking.length(min(remaining, checkpoint - start) if checkpoint else remaining, budget)
        return length if sequence.images is None else sequence.images.uncut(start, length, most)


# Makes room for a tenant that waits while others have all the places or pages.


def admit_starved(state: SchedulerState, places: int, preempted: list[Sequence], now: float) -> None:
    """Admits a sequence of a tenant with no running sequence, if necessary by preempting others.

    It preempts sequences of the tenant that is most over its fair share, and adds them to `preempted`. This happens
    only if preempted sequences can find their pages again in the prefix cache. It happens only once for each waiting
    sequence, because preempting may not make enough room.

    places: how many sequences may run.
    """
    tenants = state.queue.tenants
    starved = tenants.starved if state.reuses_pages else None
    if starved is None:
        return
    while len(state.running) >= places or not state.join(starved, now):
        tenant = tenants.over_share(places)
        if tenant is None:
            return
        newest = next(sequence for sequence in reversed(state.running) if sequence.turn.tenant == tenant)
        state.preempt(newest, now)
        preempted.append(newest)
        starved.turn.preempted_for = True


# Makes the parts of a scheduler that only some models or settings need, and loads their modules only then.


def states_of(config: SchedulerConfig, slots: PagePool | None, page_size: int) -> "States | None":
    """Returns the States that give slots for recurrent states to sequences; None if no layer has a recurrent state."""
    if slots is None:
        return None
    from worker.scheduler.recurrent_slots import States

    interval = config.state_checkpoint_tokens if config.prefix_cache else 0
    return States(slots, page_size, interval, overlap=config.overlap)


def speculation_of(config: SchedulerConfig, states: "States | None" = None) -> "Speculation | None":
    """Returns the Speculation that proposes drafts for decodes; None if speculation is off."""
    if not config.max_draft_tokens:
        return None
    from worker.scheduler.drafts import Speculation

    return Speculation(config, states)


def stages_of(
    config: SchedulerConfig, running: Collection[Sequence], queue: WaitingQueue, step_time: StepTimePolicy,
    most_in_flight: float,
) -> "StageShares | None":  # fmt: skip
    """Returns the StageShares that limit steps if the model is cut into stages; None if it is not."""
    if config.pipeline_parallel_size == 1:
        return None
    from worker.scheduler.pipeline import StageShares

    return StageShares(config.pipeline_parallel_size, running, queue, step_time, most_in_flight)
