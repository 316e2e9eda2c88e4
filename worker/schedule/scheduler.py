"""The scheduler: which tokens the next step computes, and what the step's results mean.

    submit(sequence, now)       a sequence waits from now on; raises Refused
    plan(now)                   the next step: which sequences compute how many tokens
    launched(plan)              that step is in flight, so that the next plan() goes on from there
    update(plan, ids, now)      its ids were sampled: new tokens, ends, and full pages that others may find
    abort(key), expire(now)     sequences leave early; their pages are free at once
    discard_in_flight()         no launched step will be updated: everything is as it was before

Pure counting in plain ints: knows nothing of tensors, sockets or clocks (the caller passes `now`).

Two choices. A prompt gets all its pages when it joins, not chunk by chunk: half-computed prompts never wait for each
other's pages, and admission is one comparison. Page growth goes before everything else in a step, from the oldest
sequence to the newest, and takes pages from the newest: the oldest always advances.

A plan may be made while steps are in flight. It goes on from the positions that those steps will have reached. A token
whose id is not known yet can be computed all the same, as the device knows it by then; but nothing is planned beyond a
length that ends the sequence. An eos among those ids shows in update(), and at worst one row was computed in vain.

A step that raised needs no undoing. plan() changes no count of computed tokens, nothing is published before update(),
and pages stay with their sequences, so the next plan() takes up the same work. A step may also be repeated in parts,
each a `Plan` of some of its chunks, to find out which sequence made it fail.
"""

from collections.abc import Iterable
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


class Scheduler:
    """All sequences of one worker."""

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        self.config = config
        self._batching = policy.batching_policy(config)
        self._chunking = policy.chunk_policy(config)
        self._order = policy.order_policy(config)
        self._step_time = policy.step_time_policy(config)
        self._speculation = Speculation(config, pool)
        self.state = SchedulerState(config, pool, reuses_pages=config.prefix_cache and not self._batching.closed)
        self._earliest_deadline = inf  # no live sequence has an earlier one
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
        )

    @property
    def has_work(self) -> bool:
        return bool(self.state.live)

    def sequences(self) -> list[Sequence]:
        """All live sequences, in order of arrival."""
        return list(self.state.live.values())

    def next_wakeup(self, now: float) -> float:
        """When to call expire() and plan() if no message arrives before: `now` or earlier is at once, inf is never."""
        queue = self.state.queue
        if self.state.running or queue.preempted:
            return now
        opens = self._batching.opens(now, queue.fresh, queue.oldest) if queue else inf
        return min(opens, self._earliest_deadline)

    # Sequences come and go

    def submit(self, sequence: Sequence, now: float) -> None:
        """Takes in a sequence, which waits from now on. Raises Refused, and changes nothing, if it cannot.

        A sequence may bring output (a stream that is resumed): its K/V is computed, its ids are not sampled again, and
        one whose output is complete ends without a new token.
        """
        if sequence.key in self.state.live:
            raise Refused(f"request id {sequence.key[1]} is in use already")
        check_possible(sequence, self.config, self.state.paging)
        if not sequence.resumed:  # a resumed one was admitted before
            check_queue(sequence, self.config, self.state.queue, len(self.state.running))
        self._earliest_deadline = min(self._earliest_deadline, sequence.deadline)
        self.state.live[sequence.key] = sequence
        self.state.queue.push(sequence, now)

    def abort(self, key: Key) -> Sequence | None:
        """Ends a sequence, waiting or running, and returns it; None if there is none (any more).

        Pages that it computed in steps that were updated stay cached; what a failed step wrote never is.
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
        """Ends and returns the sequences whose deadline has passed. Costs nothing while none has."""
        if now < self._earliest_deadline:
            return []
        expired = [sequence for sequence in self.state.live.values() if sequence.deadline <= now]
        for sequence in expired:
            self.state.leave(sequence)
        self._earliest_deadline = min((sequence.deadline for sequence in self.state.live.values()), default=inf)
        return expired

    # The next step

    def plan(self, now: float) -> Plan:
        """Decides the next step: decodes, then prompt chunks. Empty when there is nothing to compute yet."""
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
        """Admits a sequence of a tenant with nothing running by preempting the tenant most over its fair share.

        Only where a preempted sequence finds its pages again, and once for each waiting sequence: it may be in vain.
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
        """The running sequences as decodes (one token uncomputed, with a page for it) and prompts.

        Skips sequences whose last token, or whose drafts, are in flight: their length is not known yet.
        """
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        running, page_size = self.state.running, self.state.paging.pool.page_size
        for sequence in list(running):
            if preempted and sequence not in running:
                continue
            start = sequence.computed_tokens + sequence.in_flight_tokens
            length = len(sequence.tokens) + sequence.pending_outputs
            if length - start > 1:
                prompts.append(sequence)
            elif length <= start or (sequence.pending_outputs and self.state.at_max_length(sequence, length)):
                continue
            elif start < len(sequence.pages) * page_size or self._add_page(sequence, preempted, now):
                decodes.append(sequence)
        return decodes, prompts

    def _add_page(self, sequence: Sequence, preempted: list[Sequence], now: float) -> bool:
        """One more page, by preempting the newest sequences if need be; False if this one was preempted itself."""
        while not self.state.paging.grow(sequence):
            newest = next(reversed(self.state.running))
            self.state.preempt(newest, now)
            preempted.append(newest)
            if newest is sequence:
                return False
        return True

    def _decode_chunks(self, decodes: list[Sequence]) -> list[Chunk]:
        outcome = self.state.outcome
        return [
            # The token may be a prompt's last one, and max_tokens 0: then nothing is sampled.
            Chunk(
                sequence,
                sequence.computed_tokens + sequence.in_flight_tokens,
                1,
                sequence.first_token != 0.0 or sequence.pending_outputs > 0 or outcome(sequence) is None,
            )
            for sequence in decodes
        ]

    def _prefill_chunks(self, prompts: list[Sequence], budget: int, now: float, *, admit: bool) -> list[Chunk]:
        """Chunks of running prompts, then of sequences that join for them."""
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
        """Appends the sequence's next prompt chunk if the step has room for one; returns its length."""
        start = sequence.computed_tokens + sequence.in_flight_tokens
        remaining = len(sequence.tokens) - start
        length = self._chunking.length(remaining, budget) if len(chunks) < limit else 0
        if length:
            samples = length == remaining and self.state.outcome(sequence) is None
            chunks.append(Chunk(sequence, start, length, samples))
        return length

    # The results of a step

    def launched(self, plan: Plan) -> None:
        """The step is in flight. Raises ValueError, and changes nothing, if it does not go on from the last one."""
        chunks = [chunk for chunk in plan.chunks if chunk.sequence in self.state.running]
        for chunk in chunks:
            if chunk.start != chunk.sequence.computed_tokens + chunk.sequence.in_flight_tokens:
                raise ValueError(f"{chunk.sequence.key} has moved on since this plan was made")
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.in_flight_tokens += chunk.length
            sequence.pending_outputs += chunk.samples
        self._step_time.launched(len(plan.chunks))

    def update(self, plan: Plan, ids: list[int], now: float) -> list[SequenceUpdate]:
        """Applies a step's results: `ids[i]` was sampled for `plan.rows[i]`. Steps are updated in launch order.

        Skips sequences that left, or were preempted, since the plan was made. Raises ValueError, and changes nothing,
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
                continue  # it left or was preempted, and may run again
            update = self._apply(chunk, own, now)
            if update is not None:
                updates.append(update)
        self._generation_tokens += len(ids) - drafts  # _mark_computed() adds the accepted ones
        return updates

    def discard_in_flight(self) -> None:
        """No launched step will be updated: the next plan() takes up their work again."""
        self._step_time.discarded()
        for sequence in self.state.running:
            sequence.in_flight_tokens = sequence.pending_outputs = 0

    def retryable(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """The chunks of a discarded step that can be computed again as they are, without their drafts."""
        running = self.state.running
        left = [chunk for chunk in chunks if chunk.sequence in running]
        return [without_drafts(chunk) for chunk in left if chunk.sequence.computed_tokens == chunk.start]

    def _apply(self, chunk: Chunk, ids: list[int], now: float) -> SequenceUpdate | None:
        """Applies one chunk and its ids; None while the prompt is not complete."""
        sequence = chunk.sequence
        if ids and sequence.constraint is not None and not sequence.constraint.accept(ids[0]):
            self._mark_computed(chunk, 0)
            self.state.leave(sequence)
            return SequenceUpdate(sequence, [], Outcome.ERROR)
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
        """Counts the chunk's tokens as computed, except its last `rejected` drafts, and publishes full pages."""
        sequence, start, page_size = chunk.sequence, chunk.start, self.state.paging.pool.page_size
        end = start + chunk.length - rejected
        sequence.computed_tokens = end
        sequence.in_flight_tokens -= chunk.length
        sequence.pending_outputs -= chunk.samples
        if start // page_size != end // page_size:
            self.state.paging.publish(sequence, start, end)
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
