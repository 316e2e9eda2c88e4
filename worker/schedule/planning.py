"""Which tokens are computed next: decodes, then prompt chunks, and who joins or has to go for them.

Two choices. A prompt gets all its pages when it joins, not chunk by chunk: half-computed prompts never wait
for each other's pages, and admission is one comparison. Page growth goes before everything else in a step,
from the oldest sequence to the newest, and takes pages from the newest: the oldest always advances.

A plan may be made while steps are under way: it goes on from where those will have come. An id that is not known yet
can be computed with all the same, as the device knows it by then; but nothing is planned beyond a length that ends the
sequence. Whether one of those ids ends it shows when it is settled, and at worst one row was computed in vain.
"""

from math import inf

from worker.schedule import policy
from worker.schedule.plan import Chunk, Plan
from worker.schedule.policy import Batching
from worker.schedule.sequence import Sequence
from worker.schedule.speculation import Speculation
from worker.schedule.state import State
from worker.schedule.step_time import StepTimePolicy


class Planner:
    """Changes nothing of what a sequence has computed: a plan that is never run does no harm."""

    def __init__(self, state: State, batching: Batching, pace: StepTimePolicy) -> None:
        self._state = state
        self._batching = batching
        self._pace = pace
        self._cutting = policy.chunk_policy(state.config)
        self._order = policy.order(state.config)
        self._drafting = Speculation(state)

    def plan(self, now: float) -> Plan:
        plan = Plan()
        self._make_room(plan.preempted, now)
        decodes, prompts = self._grow(plan.preempted, now)
        budget = self._state.config.max_step_tokens
        reserved = min(len(decodes), self._order.reserve(budget))
        room = min(budget - reserved, self._pace.room(len(decodes)))
        chunks, used = self._prompt_chunks(prompts, room, now, joining=not plan.preempted)
        served = self._order.arrange(decodes)[: max(reserved, budget - used)]
        self._order.advanced(len(served), len(decodes))
        decoding = self._decode_chunks(served)
        plan.chunks.extend(decoding if chunks else self._drafting.extend(decoding))
        plan.chunks.extend(chunks)
        self._pace.planned(now, len(plan.chunks), plan.tokens - used, used)
        return plan

    def _make_room(self, preempted: list[Sequence], now: float) -> None:
        """Lets in one whose owner has nothing running, in the place of one whose owner runs more than its share.

        Only where a preempted sequence finds its pages again, and once for each that waits: a try may be in vain.
        """
        state, turns = self._state, self._state.queue.turns
        needy = turns.needy if state.returns else None
        if needy is None:
            return
        most = state.config.max_batch_size
        while len(state.running) >= most or not state.join(needy, now):
            greedy = turns.greedy(most)
            if greedy is None:
                return
            newest = next(sequence for sequence in reversed(state.running) if sequence.tenant == greedy)
            state.preempt(newest, now)
            preempted.append(newest)
            needy.preempted_for = True

    def _grow(self, preempted: list[Sequence], now: float) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences as decodes (one token behind, with a page to put it) and prompts.

        Those whose end is under way are neither, nor those with drafts under way: nobody knows where they will come.
        """
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        running, size = self._state.running, self._state.paging.pool.page_size
        for sequence in list(running):
            if preempted and sequence not in running:
                continue
            reached = sequence.computed_tokens + sequence.in_flight_tokens
            length = len(sequence.tokens) + sequence.pending_outputs
            if length - reached > 1:
                prompts.append(sequence)
            elif length <= reached or (sequence.pending_outputs and self._state.full(sequence, length)):
                continue
            elif reached < len(sequence.pages) * size or self._add_page(sequence, preempted, now):
                decodes.append(sequence)
        return decodes, prompts

    def _add_page(self, sequence: Sequence, preempted: list[Sequence], now: float) -> bool:
        """One more page, at the newest sequences' expense; False if that is this one."""
        while not self._state.paging.grow(sequence):
            newest = next(reversed(self._state.running))
            self._state.preempt(newest, now)
            preempted.append(newest)
            if newest is sequence:
                return False
        return True

    def _decode_chunks(self, decodes: list[Sequence]) -> list[Chunk]:
        outcome = self._state.outcome
        return [
            # The one token may be a prompt's last, and max_tokens 0: then nothing is sampled.
            Chunk(
                sequence,
                sequence.computed_tokens + sequence.in_flight_tokens,
                1,
                sequence.first_token != 0.0 or sequence.pending_outputs > 0 or outcome(sequence) is None,
            )
            for sequence in decodes
        ]

    def _prompt_chunks(
        self, prompts: list[Sequence], budget: int, now: float, *, joining: bool
    ) -> tuple[list[Chunk], int]:
        """Chunks of running prompts, then of sequences that join for them; and how many tokens they take."""
        chunks: list[Chunk] = []
        left = budget
        state, queue = self._state, self._state.queue
        most = state.config.max_prefill_chunks_per_step or inf
        for sequence in prompts:
            left -= self._cut(sequence, left, chunks, most)
        if not joining or not queue:
            return chunks, budget - left
        queue.turns.settle()
        places = self._batching.joining(now, len(state.running), queue.resuming, queue.fresh, queue.oldest)
        while places > 0 and (self._batching.closed or (left > 0 and len(chunks) < most)):
            head = queue.head
            if head is None or not state.join(head, now):
                break
            places -= 1
            left -= self._cut(head, left, chunks, most)
        return chunks, budget - left

    def _cut(self, sequence: Sequence, budget: int, chunks: list[Chunk], most: float) -> int:
        """Adds the sequence's next chunk if the step has room for one; its length."""
        start = sequence.computed_tokens + sequence.in_flight_tokens
        behind = len(sequence.tokens) - start
        length = self._cutting.cut(behind, budget) if len(chunks) < most else 0
        if length:
            samples = length == behind and self._state.outcome(sequence) is None
            chunks.append(Chunk(sequence, start, length, samples))
        return length
