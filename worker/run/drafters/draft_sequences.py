"""The draft model's data for each sequence that it drafts for: the tokens, K/V pages and recurrent states."""

from array import array
from dataclasses import dataclass

import msgspec

from worker.kv_cache.pages import PagePool
from worker.run.drafters.drafter_base import grow
from worker.schedule.records.adjustment import with_biases_of
from worker.schedule.records.sequence_states import SequenceStates
from worker.schedule.sequence import Sequence

SLOTS_EACH = 3  # slots for recurrent states: one for the state after the known tokens, one to read, one to write


@dataclass(slots=True, eq=False)
class DraftSequence:
    """The draft model's copy of a sequence of the served model, the target.

    `own.tokens` are the tokens of the target, followed by drafts. The first `own.computed_tokens` of them have K/V in
    the drafter's pages, and the first `known` of these are not drafts. Recurrent layers keep the state after `known`.
    """

    own: Sequence
    known: int = 0

    @classmethod
    def of(cls, target: Sequence) -> "DraftSequence":
        sampling = msgspec.structs.replace(target.sampling, prompt_logprobs=False)
        own = Sequence(target.key, list(target.tokens), target.prompt_len, sampling, target.seed)
        own.adjustment = with_biases_of(target.adjustment, own.adjustment)
        own.pages = [array("i")]
        return cls(own)

    @property
    def left(self) -> int:
        return self.own.uncomputed_tokens

    def follow(self, tokens: list[int]) -> None:
        """Takes over the tokens of the target, which may only grow between calls. Forgets the K/V of wrong drafts.

        At least the last token remains uncomputed, because its row gives the first draft.
        """
        own = self.own
        same = min(self.known, len(tokens) - 1)
        if own.states is None:
            most = min(own.computed_tokens, len(tokens) - 1)
            while same < most and own.tokens[same] == tokens[same]:
                same += 1
        elif same < self.known:  # there is no state for the position before the last token
            same = 0
        own.tokens[:] = tokens
        own.computed_tokens = same
        self.known = min(self.known, same)
        self._keep_states(same)

    def computed(self, end: int, *, known: bool) -> None:
        """Notes that the first `end` tokens are computed. known: whether none of them is a draft."""
        own = self.own
        if own.states is not None:
            own.states.at[end] = own.states.free.pop()
        own.computed_tokens = end
        self.known = end if known else self.known
        self._keep_states(self.known, end)

    def _keep_states(self, *positions: int) -> None:
        """Keeps the states after these numbers of tokens, and frees the slots of all other states."""
        states = self.own.states
        if states is not None:
            states.free += [slot for at, slot in states.at.items() if at not in positions]
            states.at = {at: slot for at, slot in states.at.items() if at in positions}


class DraftSequences:
    """Gives pages and slots to the sequences of a drafter, and takes them back when a target has ended.

    slots: the pool of slots for recurrent states; None if the draft model has no recurrent layers.
    """

    def __init__(self, pool: PagePool, slots: PagePool | None) -> None:
        self._pool, self._slots = pool, slots
        self._held: dict[Sequence, DraftSequence] = {}  # target → its draft sequence

    def __len__(self) -> int:
        return len(self._held)

    def get(self, target: Sequence, room: int) -> DraftSequence | None:
        """Returns the draft sequence of a target, with pages for `room` tokens; None if the memory does not suffice."""
        held = self._held.get(target) or self._new(target)
        return held if held is not None and grow(held.own.pages[0], self._pool, room) else None

    def forget(self, target: Sequence) -> None:
        """Frees the pages and slots of a target, if it has any."""
        held = self._held.pop(target, None)
        if held is not None:
            self._pool.release(held.own.pages[0])
            if self._slots is not None and held.own.states is not None:
                self._slots.release([*held.own.states.free, *held.own.states.at.values()])

    def _new(self, target: Sequence) -> DraftSequence | None:
        held = DraftSequence.of(target)
        if self._slots is not None:
            free = self._slots.acquire(SLOTS_EACH)
            if free is None:
                return None
            held.own.states = SequenceStates({}, free)
        self._held[target] = held
        return held
