"""The scheduler: decides which tokens the next step computes, and applies the results of steps.

    submit(sequence, now)       adds a sequence to the queue; raises Refused
    plan(now)                   decides the next step: which sequences compute how many tokens
    launched(plan)              notes that the step is in flight, so that the next plan() continues from there
    update(plan, ids, now)      applies the sampled ids: adds tokens, ends sequences, publishes full pages
    abort(key), expire(now)     remove sequences early; their pages are free at once
    discard_in_flight()         forgets the steps in flight, as if they had not been launched

The scheduler counts in plain ints and knows nothing about tensors, sockets or clocks (the caller passes `now`).

Two design choices:
- A prompt gets all its pages when it joins, not chunk by chunk. Half-computed prompts therefore never wait for each
  other's pages, and admission is one comparison. Only layers with a sliding window get pages chunk by chunk, because
  they return as many behind the window (paging.py).
- Running sequences get the pages to grow before anything else in a step, from the oldest sequence to the newest. If no
  page is free, the newest sequence is preempted. The oldest sequence therefore always advances.

A plan may be made while steps are in flight. It continues from the positions that those steps will have reached. A
token whose id the host does not know yet can be in the plan, because the device will know it by then. Nothing is
planned beyond a length that ends the sequence. If one of those ids is an eos, update() sees that later, and at worst
one row was computed in vain.

After a step that raised, nothing has to be undone. plan() does not change the counts of computed tokens, pages are not
published before update(), and sequences keep their pages, so the next plan() contains the same work. To find out which
sequence made a step fail, the step may also be repeated in parts, each a `Plan` of some of its chunks.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import islice
from math import inf

from shared.messages import Outcome
from worker.kv_cache.pages import PagePool
from worker.schedule import policy
from worker.schedule.admission import Refused, check_possible, check_queue
from worker.schedule.policy import SchedulerConfig
from worker.schedule.sequence import Chunk, Key, Plan, Sequence, SequenceUpdate
from worker.schedule.speculation import Speculation, accepted_ids, without_drafts
from worker.schedule.state import SchedulerState, SchedulerStatus
from worker.schedule.states import States


class Scheduler:
    """Schedules all sequences of one worker."""

    def __init__(self, config: SchedulerConfig, pools: Seq[PagePool], slots: PagePool | None = None) -> None:
        """pools: one for each group of layers that keep the same of a sequence (worker/kv_cache/groups.py).

        slots: those for recurrent states, if layers have them.
        """
        self.config = config
        self._batching = policy.batching_policy(config)
        self._chunking = policy.chunk_policy(config)
        self._order = policy.order_policy(config)
        self._step_time = policy.step_time_policy(config)
        self._speculation = Speculation(config)
        interval = config.state_checkpoint_tokens if config.prefix_cache else 0
        self._states = None if slots is None else States(slots, pools[0].page_size, interval, overlap=config.overlap)
        reuses_pages = config.prefix_cache and not self._batching.closed
        self.state = SchedulerState(config, pools, self._states, reuses_pages=reuses_pages)
        self._earliest_deadline = inf  # no live sequence has an earlier deadline
        self._prefix_cache_reset = 0  # the nonce of the latest reset
        self._prefill_tokens = 0
        self._generation_tokens = 0

    # Queries

    @property
    def status(self) -> SchedulerStatus:
        state, prefix = self.state, self.state.paging.prefix
        return SchedulerStatus(
            running=len(state.running),
            waiting=len(state.queue),
            waiting_tokens=state.queue.tokens,
            preemptions=state.preemptions,
            prefill_tokens=self._prefill_tokens,
            generation_tokens=self._generation_tokens,
            draft_tokens=self._speculation.draft_tokens,
            accepted_tokens=self._speculation.accepted_tokens,
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
        """Empties the prefix cache; the status then has the nonce."""
        if self.state.paging.prefix is not None:
            self.state.paging.prefix.clear()
        self._prefix_cache_reset = nonce

    # Sequences come and go

    def submit(self, sequence: Sequence, now: float) -> None:
        """Adds a sequence to the queue. Raises Refused and changes nothing if it cannot be accepted.

        A resumed sequence brings the output that it has so far: the K/V of this output is computed, but its ids are not
        sampled again. If the output is complete, the sequence ends without a new token.
        """
        if sequence.key in self.state.live:
            raise Refused(f"request id {sequence.key[1]} is in use already")
        check_possible(sequence, self.config, self.state.paging)
        if not sequence.resumed:  # a resumed sequence was admitted before
            check_queue(sequence, self.config, self.state.queue, len(self.state.running))
        self._earliest_deadline = min(self._earliest_deadline, sequence.deadline)
        self.state.live[sequence.key] = sequence
        self.state.queue.push(sequence, now)

    def abort(self, key: Key) -> Sequence | None:
        """Ends a waiting or running sequence and returns it. Returns None if no live sequence has this key.

        Full pages that update() has published stay cached. Pages that a failed step wrote are never published.
        """
        sequence = self.state.live.get(key)
        if sequence is not None:
            self.state.leave(sequence)
        return sequence

    def fail(self, sequence: Sequence) -> None:
        """Ends a sequence whose step failed, unless it has left already."""
        if self.state.live.get(sequence.key) is sequence:
            self.state.leave(sequence)

    def expire(self, now: float) -> list[Sequence]:
        """Ends and returns the sequences whose deadlines have passed. Costs nothing before the earliest deadline."""
        if now < self._earliest_deadline:
            return []
        expired = [sequence for sequence in self.state.live.values() if sequence.deadline <= now]
        for sequence in expired:
            self.state.leave(sequence)
        self._earliest_deadline = min((sequence.deadline for sequence in self.state.live.values()), default=inf)
        return expired

    # The next step

    def plan(self, now: float) -> Plan:
        """Decides the next step: decodes, then prompt chunks. The plan is empty if there is nothing to compute yet."""
        plan = Plan()
        self._admit_starved_tenant(plan.preempted, now)
        decodes, prompts = self._running_work(plan.preempted, now)
        budget = self.config.max_step_tokens
        reserved = min(len(decodes), self._order.reserve(budget))
        prefill_budget = min(budget - reserved, self._step_time.prefill_budget(len(decodes)))
        prefills = self._prefill_chunks(prompts, prefill_budget, now, admit=not plan.preempted)
        prefill_tokens = sum(chunk.length for chunk in prefills)
        served = self._order.arrange(decodes)[: max(reserved, budget - prefill_tokens)]
        self._order.served(len(served), len(decodes))
        chunks = self._decode_chunks(served)
        plan.chunks.extend(chunks if prefills else self._speculation.add_drafts(chunks))
        plan.chunks.extend(prefills)
        self._step_time.planned(now, len(plan.chunks), plan.tokens - prefill_tokens, prefill_tokens)
        return plan

    def _admit_starved_tenant(self, preempted: list[Sequence], now: float) -> None:
        """Admits a sequence of a tenant with no running sequence, if necessary by preempting others.

        It preempts sequences of the tenant that is most over its fair share. This happens only if a preempted sequence
        finds its pages again in the prefix cache, and only once for each waiting sequence, because it may not help.
        """
        state, tenants = self.state, self.state.queue.tenants
        starved = tenants.starved if state.reuses_pages else None
        if starved is None:
            return
        places = self.config.max_batch_size
        while len(state.running) >= places or not state.join(starved, now):
            tenant = tenants.over_share(places)
            if tenant is None:
                return
            newest = next(sequence for sequence in reversed(state.running) if sequence.tenant == tenant)
            state.preempt(newest, now)
            preempted.append(newest)
            starved.preempted_for = True

    def _running_work(self, preempted: list[Sequence], now: float) -> tuple[list[Sequence], list[Sequence]]:
        """Divides the running sequences into decodes (one uncomputed token) and prompts, and gives pages to them.

        Each decode has a page for its token, and the prompts that may be in this step have pages for their chunks.
        Skips sequences whose last token is in flight, and those with drafts in flight, as their length is not known.
        """
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        running, budget = self.state.running, self.config.max_step_tokens
        for sequence in list(running):
            if preempted and sequence not in running:
                continue
            start = sequence.computed_tokens + sequence.in_flight_tokens
            length = len(sequence.tokens) + sequence.pending_outputs
            if length - start > 1:
                if sequence.room < length:  # a window does not claim pages for a whole prompt
                    chunk = self._chunking.length(self._uncut(sequence, start, length - start), budget)
                    budget -= chunk
                    if sequence.room < start + chunk and not self._add_pages(sequence, start + chunk, preempted, now):
                        continue
                prompts.append(sequence)
            elif length <= start or (sequence.pending_outputs and self.state.at_max_length(sequence, length)):
                continue
            elif start < sequence.room or self._add_pages(sequence, start + 1, preempted, now):
                decodes.append(sequence)
        return decodes, prompts

    def _add_pages(self, sequence: Sequence, end: int, preempted: list[Sequence], now: float) -> bool:
        """Gives a sequence pages for its first `end` tokens, and preempts the newest sequences if necessary.

        Returns False if the sequence itself was preempted.
        """
        while not self.state.paging.grow(sequence, end):
            newest = next(reversed(self.state.running))
            self.state.preempt(newest, now)
            preempted.append(newest)
            if newest is sequence:
                return False
        return True

    def _decode_chunks(self, decodes: list[Sequence]) -> list[Chunk]:
        outcome = self.state.outcome
        return [
            # If the token is the last of a prompt and max_tokens is 0, nothing is sampled.
            Chunk(
                sequence,
                sequence.computed_tokens + sequence.in_flight_tokens,
                1,
                sequence.first_token != 0.0 or sequence.pending_outputs > 0 or outcome(sequence) is None,
            )
            for sequence in decodes
        ]

    def _prefill_chunks(self, prompts: list[Sequence], budget: int, now: float, *, admit: bool) -> list[Chunk]:
        """Returns the chunks of running prompts, then those of sequences that join now."""
        chunks: list[Chunk] = []
        state, queue = self.state, self.state.queue
        limit = self.config.max_prefill_chunks_per_step or inf
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
        start = sequence.computed_tokens + sequence.in_flight_tokens
        remaining = len(sequence.tokens) - start
        length = self._chunking.length(self._uncut(sequence, start, remaining), budget) if len(chunks) < limit else 0
        if length:
            samples = length == remaining and self.state.outcome(sequence) is None
            chunks.append(Chunk(sequence, start, length, samples))
        return length

    def _uncut(self, sequence: Sequence, start: int, remaining: int) -> int:
        """Returns how many of the remaining tokens a chunk may have: it ends where a state is to be published."""
        checkpoint = self._states.next_checkpoint(sequence, start) if self._states is not None else 0
        return min(remaining, checkpoint - start) if checkpoint else remaining

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
        sampled, running, drafts = iter(ids), self.state.running, 0
        for chunk in plan.chunks:
            own = [next(sampled)] if chunk.samples else []
            if chunk.drafts:
                own = accepted_ids([*own, *islice(sampled, len(chunk.drafts))], chunk.drafts)
                drafts += len(chunk.drafts)
            if chunk.sequence not in running or chunk.sequence.in_flight_tokens < chunk.length:
                continue  # it has left, or was preempted (and may run again)
            update = self._apply(chunk, own, now)
            if update is not None:
                updates.append(update)
        self._generation_tokens += len(ids) - drafts  # _mark_computed() has added the accepted drafts
        return updates

    def discard_in_flight(self) -> None:
        """Forgets the launched steps, for which update() will not be called. The next plan() repeats their work."""
        self._step_time.discarded()
        for sequence in self.state.running:
            sequence.in_flight_tokens = sequence.pending_outputs = 0
            if self._states is not None:
                self._states.discard(sequence)

    def retryable(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Returns the chunks of a discarded step that can be computed again, without their drafts."""
        running = self.state.running
        left = [chunk for chunk in chunks if chunk.sequence in running]
        return [without_drafts(chunk) for chunk in left if chunk.sequence.computed_tokens == chunk.start]

    def _apply(self, chunk: Chunk, ids: list[int], now: float) -> SequenceUpdate | None:
        """Applies one chunk and its ids. Returns None if the prompt is not complete yet."""
        sequence = chunk.sequence
        if ids and sequence.constraint is not None and not sequence.constraint.accept(ids[0]):
            self._mark_computed(chunk, 0)
            self.state.leave(sequence)
            return SequenceUpdate(sequence, [], Outcome.ERROR)
        if sequence.constraint is not None and sequence.constraint.idle:
            sequence.constraint = None
        outcome = None
        for count, id in enumerate(ids, 1):
            sequence.tokens.append(id)
            outcome = self.state.outcome(sequence)
            if outcome is not None:
                del ids[count:]
                break
        self._mark_computed(chunk, chunk.rows - len(ids) if chunk.drafts else 0)
        if ids:
            sequence.first_token = sequence.first_token or now
        elif sequence.computed_tokens < len(sequence.tokens):
            return None
        else:
            outcome = self.state.outcome(sequence)
        if outcome is not None:
            self.state.leave(sequence)
        return SequenceUpdate(sequence, ids, outcome)

    def _mark_computed(self, chunk: Chunk, rejected: int) -> None:
        """Counts the chunk's tokens as computed, except its last `rejected` drafts; publishes and returns pages."""
        sequence, start, paging = chunk.sequence, chunk.start, self.state.paging
        end = start + chunk.length - rejected
        sequence.computed_tokens = end
        sequence.in_flight_tokens -= chunk.length
        sequence.pending_outputs -= chunk.samples
        if start // paging.page_size != end // paging.page_size:
            paging.publish(sequence, start, end)
            paging.return_behind(sequence)
        if self._states is not None:
            self._states.computed(sequence, start)
        if chunk.drafts:
            self._generation_tokens += len(chunk.drafts) - rejected
            self._speculation.record(chunk, len(chunk.drafts) - rejected)
        elif chunk.length > 1 or start < sequence.prompt_len:
            self._prefill_tokens += chunk.length
        if sequence.group and end >= sequence.prompt_len:
            self.state.queue.release_group(sequence)

    def check(self) -> None:
        """Raises AssertionError unless pages, queue and sequences agree; for tests and idle moments."""
        self.state.check()
