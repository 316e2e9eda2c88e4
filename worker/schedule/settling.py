"""What a step's results mean: a step is launched, and later settled with its ids, or abandoned.

    advance(plan)       its chunks are under way, so that the next plan goes on from there
    settle(plan, ids)   they are computed: tokens, ends, and full pages that others may find
    abandon()           nothing that is under way will be settled: all is as it was before

What counts as computed, and all that anybody is told, is what has been settled.
"""

from collections.abc import Iterable

from shared.messages import Outcome
from worker.schedule.pace import Pace
from worker.schedule.plan import Advance, Chunk, Plan
from worker.schedule.sequence import Sequence
from worker.schedule.state import State


class Settler:
    """`prefill_tokens` and `generation_tokens` count what was computed, in all."""

    def __init__(self, state: State, pace: Pace) -> None:
        self.prefill_tokens = 0
        self.generation_tokens = 0
        self._state = state
        self._pace = pace

    def advance(self, plan: Plan) -> None:
        """Raises ValueError, and applies nothing, if the plan does not go on from what is computed or under way."""
        running = self._state.running
        chunks = [chunk for chunk in plan.chunks if chunk.sequence in running]
        for chunk in chunks:
            if chunk.start != chunk.sequence.computed + chunk.sequence.flying:
                raise ValueError(f"{chunk.sequence.key} has moved on since this plan was made")
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.flying += chunk.length
            sequence.due += chunk.samples
        self._pace.launched(len(plan.chunks))

    def settle(self, plan: Plan, ids: list[int], now: float) -> list[Advance]:
        """`ids[i]` was sampled for `plan.sampling[i]`. Steps are settled in the order in which they were launched.

        Sequences that left, or were preempted, since the plan was made are passed over. Raises ValueError, and applies
        nothing, if the ids do not fit the plan.
        """
        check_ids(plan, ids)
        self._pace.settled(now)
        advances: list[Advance] = []
        sampled, running = iter(ids), self._state.running
        for chunk in plan.chunks:
            sequence = chunk.sequence
            token = next(sampled) if chunk.samples else None
            if sequence not in running or sequence.flying < chunk.length:
                continue
            self._computed(chunk)
            advance = self._advance(sequence, token, now)
            if advance is not None:
                advances.append(advance)
        self.generation_tokens += len(ids)
        return advances

    def abandon(self) -> None:
        self._pace.abandoned()
        for sequence in self._state.running:
            sequence.flying = sequence.due = 0

    def current(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Those that can still be computed as they are."""
        running = self._state.running
        return [one for one in chunks if one.sequence in running and one.sequence.computed == one.start]

    def _computed(self, chunk: Chunk) -> None:
        sequence, start, size = chunk.sequence, chunk.start, self._state.paging.pool.page_size
        end = start + chunk.length
        sequence.computed = end
        sequence.flying -= chunk.length
        sequence.due -= chunk.samples
        if start // size != end // size:
            self._state.paging.publish(sequence, start, end)
        if chunk.length > 1 or start < sequence.prompt_len:
            self.prefill_tokens += chunk.length
        if sequence.group and end >= sequence.prompt_len:
            self._state.queue.prompt_done(sequence)

    def _advance(self, sequence: Sequence, token: int | None, now: float) -> Advance | None:
        """None while its prompt is not through."""
        if token is not None and sequence.constraint is not None and not sequence.constraint.advance(token):
            self._state.leave(sequence)
            return Advance(sequence, [], Outcome.ERROR)
        if token is not None:
            sequence.tokens.append(token)
            sequence.first_token = sequence.first_token or now
        elif sequence.computed < len(sequence.tokens):
            return None
        outcome = self._state.outcome(sequence)
        if outcome is not None:
            self._state.leave(sequence)
        return Advance(sequence, [] if token is None else [token], outcome)


def check_ids(plan: Plan, ids: list[int]) -> None:
    samples = sum([chunk.samples for chunk in plan.chunks])
    if samples != len(ids):
        raise ValueError(f"the plan samples {samples} tokens, but {len(ids)} came")
