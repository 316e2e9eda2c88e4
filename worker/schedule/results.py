"""What a step's results mean: a step is launched, and later settled with its ids, or abandoned.

    advance(plan)       its chunks are under way, so that the next plan goes on from there
    settle(plan, ids)   they are computed: tokens, ends, and full pages that others may find
    abandon()           nothing that is under way will be settled: all is as it was before

What counts as computed, and all that anybody is told, is what has been settled.
"""

from collections.abc import Iterable
from itertools import islice, takewhile

from shared.messages import Outcome
from worker.schedule.plan import Advance, Chunk, Plan
from worker.schedule.state import State
from worker.schedule.step_time import StepTimePolicy


class ResultApplier:
    """`prefill_tokens` and `generation_tokens` count what was computed, in all, drafts if they were accepted."""

    def __init__(self, state: State, pace: StepTimePolicy) -> None:
        self.prefill_tokens = 0
        self.generation_tokens = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self._state = state
        self._pace = pace

    def advance(self, plan: Plan) -> None:
        """Raises ValueError, and applies nothing, if the plan does not go on from what is computed or under way."""
        running = self._state.running
        chunks = [chunk for chunk in plan.chunks if chunk.sequence in running]
        for chunk in chunks:
            if chunk.start != chunk.sequence.computed_tokens + chunk.sequence.in_flight_tokens:
                raise ValueError(f"{chunk.sequence.key} has moved on since this plan was made")
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.in_flight_tokens += chunk.length
            sequence.pending_outputs += chunk.samples
        self._pace.launched(len(plan.chunks))

    def settle(self, plan: Plan, ids: list[int], now: float) -> list[Advance]:
        """`ids[i]` was sampled for `plan.rows[i]`. Steps are settled in the order in which they were launched.

        Sequences that left, or were preempted, since the plan was made are passed over. Raises ValueError, and applies
        nothing, if the ids do not fit the plan.
        """
        check_ids(plan, ids)
        self._pace.settled(now)
        advances: list[Advance] = []
        sampled, running = iter(ids), self._state.running
        for chunk in plan.chunks:
            own = [next(sampled)] if chunk.samples else []
            if chunk.drafts:
                own = _agreed([*own, *islice(sampled, len(chunk.drafts))], chunk.drafts)
                self.generation_tokens -= len(chunk.drafts)  # those accepted are added later
            if chunk.sequence not in running or chunk.sequence.in_flight_tokens < chunk.length:
                continue
            advance = self._advance(chunk, own, now)
            if advance is not None:
                advances.append(advance)
        self.generation_tokens += len(ids)
        return advances

    def abandon(self) -> None:
        self._pace.abandoned()
        for sequence in self._state.running:
            sequence.in_flight_tokens = sequence.pending_outputs = 0

    def current(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Those that can still be computed, less their drafts, of which their sequences get no more."""
        running = self._state.running
        left = [one for one in chunks if one.sequence in running and one.sequence.computed_tokens == one.start]
        return [_undrafted(one) if one.drafts else one for one in left]

    def _computed(self, chunk: Chunk, refused: int) -> None:
        """All of it but its last `refused` tokens, which were drafts."""
        sequence, start, size = chunk.sequence, chunk.start, self._state.paging.pool.page_size
        end = start + chunk.length - refused
        sequence.computed_tokens = end
        sequence.in_flight_tokens -= chunk.length
        sequence.pending_outputs -= chunk.samples
        if start // size != end // size:
            self._state.paging.publish(sequence, start, end)
        if chunk.drafts:
            self._judge(chunk, len(chunk.drafts) - refused)
        elif chunk.length > 1 or start < sequence.prompt_len:
            self.prefill_tokens += chunk.length
        if sequence.group and end >= sequence.prompt_len:
            self._state.queue.prompt_done(sequence)

    def _judge(self, chunk: Chunk, accepted: int) -> None:
        self.draft_tokens += len(chunk.drafts)
        self.accepted_tokens += accepted
        self.generation_tokens += accepted
        if chunk.sequence.drafter is not None:
            chunk.sequence.drafter.learn(len(chunk.drafts), accepted)

    def _advance(self, chunk: Chunk, ids: list[int], now: float) -> Advance | None:
        """None while its prompt is not through."""
        sequence = chunk.sequence
        if ids and sequence.constraint is not None and not sequence.constraint.advance(ids[0]):
            self._computed(chunk, 0)
            self._state.leave(sequence)
            return Advance(sequence, [], Outcome.ERROR)
        outcome = None
        for count, id in enumerate(ids, 1):
            sequence.tokens.append(id)
            outcome = self._state.outcome(sequence)
            if outcome is not None:
                del ids[count:]
                break
        self._computed(chunk, chunk.rows - len(ids) if chunk.drafts else 0)
        if ids:
            sequence.first_token = sequence.first_token or now
        elif sequence.computed_tokens < len(sequence.tokens):
            return None
        else:
            outcome = self._state.outcome(sequence)
        if outcome is not None:
            self._state.leave(sequence)
        return Advance(sequence, ids, outcome)


def _agreed(ids: list[int], drafts: tuple[int, ...]) -> list[int]:
    """What was sampled after tokens that did come: up to the first id that is not what was drafted."""
    true = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, drafts, strict=False)))
    return ids[: true + 1]


def _undrafted(chunk: Chunk) -> Chunk:
    if chunk.sequence.drafter is not None:
        chunk.sequence.drafter.stop()
    return Chunk(chunk.sequence, chunk.start, chunk.length - len(chunk.drafts), chunk.samples)


def check_ids(plan: Plan, ids: list[int]) -> None:
    """Raises ValueError unless there is an id for each of the plan's rows."""
    samples = sum([chunk.samples + len(chunk.drafts) for chunk in plan.chunks])
    if samples != len(ids):
        raise ValueError(f"the plan samples {samples} tokens, but {len(ids)} came")
