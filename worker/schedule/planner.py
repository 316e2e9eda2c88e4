"""Plans the next step: which sequences compute how many tokens.

- A prompt gets all its pages when it joins, not chunk by chunk. Half-computed prompts therefore never wait for each
  other's pages, and admission is one comparison. Only layers with a sliding window get pages chunk by chunk, because
  each chunk frees as many pages behind the window (paging.py).
- Running sequences get the pages to grow before anything else in a step, from the oldest sequence to the newest. If no
  page is free, the newest sequence is preempted. The oldest sequence therefore always advances.
"""

from math import inf
from typing import TYPE_CHECKING

from worker.schedule.features.features import stages_of
from worker.schedule.host_budget import HostBudget
from worker.schedule.policy import BatchingPolicy, SchedulerConfig, chunk_policy, order_policy, step_time_policy
from worker.schedule.sequence import Chunk, Plan, Sequence
from worker.schedule.starved_tenants import admit_starved
from worker.schedule.state import SchedulerState

if TYPE_CHECKING:  # features, which are imported at run time only when needed
    from worker.schedule.features.speculation import Speculation
    from worker.schedule.features.states import States


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
        self._host = HostBudget()

    def plan(self, now: float) -> Plan:
        """Decides the next step: decodes, then prompt chunks. The plan is empty if there is nothing to compute yet."""
        plan = Plan()
        admit_starved(self._state, self._config.max_batch_size, plan.preempted, now)
        decodes, prompts = self._running_work(plan.preempted, now)
        decodes = self._host.affordable(decodes)
        budget, limits = self._config.max_step_tokens, self._stages or self.step_time
        reserved = min(len(decodes), self._order.reserve(budget))
        prefill_budget = min(budget - reserved, limits.prefill_budget(len(decodes)))
        prefills = self._prefill_chunks(prompts, prefill_budget, now, admit=not plan.preempted)
        prefill_tokens = sum(chunk.length for chunk in prefills)
        served = self._order.arrange(decodes)[: max(reserved, budget - prefill_tokens)]
        self._order.served(len(served), len(decodes))
        plan.chunks.extend(self._decode_chunks(served))
        plan.chunks.extend(prefills)
        if self._speculation is not None and self._speculation.may_draft(prefills):
            prefill_tokens = 0
            plan.chunks[:] = self._speculation.add_drafts(plan.chunks, self.step_time.row_cost)
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
            start = sequence.computed_tokens + sequence.in_flight_tokens
            length = len(sequence.tokens) + sequence.pending_outputs
            if sequence.check is not None:
                if sequence.pending_outputs:  # the id in flight decides whether there is a next token
                    continue
                length = sequence.known_len
            if length - start > 1 or sequence.check is not None:
                if sequence.room < length:  # layers with a window did not get pages for the whole prompt
                    chunk = self._length(sequence, start, length - start, budget, inf)
                    budget -= chunk
                    if sequence.room < start + chunk and not self._add_pages(sequence, start + chunk, preempted, now):
                        continue
                prompts.append(sequence)
            elif length <= start or (sequence.pending_outputs and self._state.at_max_length(sequence, length)):
                continue
            elif start < sequence.room or self._add_pages(sequence, start + 1, preempted, now):
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
        if budget > 0 and self._state.prefix_waits.waits(sequence):
            return 0
        start = sequence.computed_tokens + sequence.in_flight_tokens
        known, samples = len(sequence.tokens) - start, self._state.outcome(sequence) is None
        drafts = sequence.check.drafts(sequence.output_len) if sequence.check is not None and samples else ()
        most = budget if chunks else inf
        length = self._length(sequence, start, known + len(drafts), budget, most) if len(chunks) < limit else 0
        length = self._host.fitting(sequence, length, known, samples=samples)
        if length:
            chunks.append(Chunk(sequence, start, length, samples and length >= known, drafts[: max(0, length - known)]))
        return length

    def _length(self, sequence: Sequence, start: int, remaining: int, budget: int, most: float) -> int:
        """Returns the length of the next chunk. It does not pass the next position where a state is to be published.

        most: the longest rest of a picture that a chunk may compute to keep it whole; may be more than the budget
        """
        checkpoint = self._states.next_checkpoint(sequence, start) if self._states is not None else 0
        length = self._chunking.length(min(remaining, checkpoint - start) if checkpoint else remaining, budget)
        return length if sequence.pictures is None else sequence.pictures.uncut(start, length, most)
