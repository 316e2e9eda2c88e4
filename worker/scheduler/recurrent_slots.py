"""Gives slots for recurrent states to sequences and takes them back.

Recurrent layers keep a state of fixed size instead of K/V. A slot holds the states of all recurrent layers after some
number of tokens of a sequence. A step reads one slot of a sequence and writes another, so the step can be repeated.

A sequence gets all its slots when it joins, and uses them in turn. Running sequences therefore never wait for slots.
States at certain positions, the checkpoints, are published like pages. A published slot is never written again, and
the sequence gets a new slot to replace it.
"""

from collections import Counter
from collections.abc import Callable, Collection

from worker.kv_cache.pages import PagePool, slots_per_sequence
from worker.scheduler.sequence import Sequence, SequenceStates, slots_of


class States:
    """Gives slots to sequences, from one pool whose pages are the slots.

    page_size: tokens in a page of K/V. interval: tokens between two checkpoints, rounded up to whole pages; 0: no state
    is published. overlap: whether a step may be launched before the results of the last one are applied.
    """

    def __init__(self, pool: PagePool, page_size: int, interval: int, *, overlap: bool) -> None:
        self.pool = pool
        self._own = slots_per_sequence(overlap=overlap)
        if pool.usable <= self._own:
            raise ValueError(f"a sequence needs {self._own + 1} slots, but there are {pool.usable}")
        self._page_size = page_size
        self._interval = -(-interval // page_size) * page_size
        # called with (sequence, end, slot) when a state after `end` tokens is to be published
        self.on_publish: list[Callable[[Sequence, int, int], None]] = []

    def has_free(self, found: int | None) -> bool:
        """Whether a sequence has enough slots to join. found: the published slot that the sequence begins with."""
        revived = found is not None and not self.pool.owned(found)
        return self._own + revived <= self.pool.available

    def claim(self, sequence: Sequence, found: int | None) -> None:
        """Gives a sequence its slots. Call it after has_free() and after setting the sequence's computed_tokens."""
        if found is not None:
            self.pool.share(found)
        at = {} if found is None else {sequence.computed_tokens: found}
        sequence.states = SequenceStates(at, self.pool.acquire(self._own) or [])

    def launched(self, sequence: Sequence, end: int) -> None:
        """Notes that a step writes the state after `end` tokens to the last free slot of the sequence."""
        states = slots_of(sequence)
        states.at[end] = states.free.pop()

    def computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Frees the slot of the state after `start` tokens, and publishes the state after `end` at a checkpoint.

        Call it when the results of a step are applied, after the pages were published. If the sequence has fewer
        computed tokens than `end`, a draft was rejected. Then the slot of the state after `end` is freed instead, and
        the next step starts from the state after `start` again.
        """
        if sequence.computed_tokens < end:
            self._take_back(sequence, end)
            return
        if start:
            self._take_back(sequence, start)
        if self._interval and end % self._page_size == 0 and end == self.next_checkpoint(sequence, end - 1):
            self._publish(sequence, end)

    def restored(self, sequence: Sequence, end: int) -> int:
        """Gives a sequence that is in no step a state after `end` tokens, which the caller copies from elsewhere.

        Returns its slot. Call it before the sequence's computed_tokens are set.
        """
        states = slots_of(sequence)
        if sequence.computed_tokens:
            self._take_back(sequence, sequence.computed_tokens)
        states.at[end] = slot = states.free.pop()
        return slot

    def publish_restored(self, sequence: Sequence, end: int) -> None:
        """Publishes the state that restored() made room for, after the pages were published."""
        self._publish(sequence, end)

    def discard(self, sequence: Sequence) -> None:
        """Frees the slots that steps in flight write."""
        for end in [end for end in slots_of(sequence).at if end > sequence.computed_tokens]:
            self._take_back(sequence, end)

    def free(self, sequence: Sequence) -> None:
        states, sequence.states = slots_of(sequence), None
        self.pool.release([*states.free, *states.at.values()])

    def next_checkpoint(self, sequence: Sequence, position: int) -> int:
        """Returns the next position after `position` at which a state is to be published. 0: nothing is published.

        The position is a multiple of the interval, or the end of the last full page before the last token of the
        prompt, because the same prompt and the next turn of a conversation continue there. If only the end of a prompt
        is scored, the position is the end of the last full page before this end, because prompts with other ends
        continue there.
        """
        if not self._interval:
            return 0
        regular = (position // self._interval + 1) * self._interval
        scored_from = sequence.scores.start if sequence.scores is not None else 0
        shared = (scored_from or sequence.prompt_len) - 1
        last = shared // self._page_size * self._page_size
        return last if position < last < regular else regular

    def check(self, running: Collection[Sequence]) -> None:
        """Raises AssertionError unless the owned slots are exactly those of the running sequences."""
        self.pool.check()
        owners: Counter[int] = Counter()
        for sequence in running:
            computed, in_flight, states = sequence.computed_tokens, sequence.in_flight_tokens, slots_of(sequence)
            owners.update([*states.at.values(), *states.free])
            private = [slot for slot in states.at.values() if not self.pool.is_published(slot)]
            assert len(private) + len(states.free) == self._own, f"{sequence.key} has lost a slot of its own"
            assert not any(map(self.pool.is_published, states.free)), f"{sequence.key} may write a checkpoint"
            assert not computed or computed in states.at, f"{sequence.key} has no state to go on from"
            assert all(computed <= at <= computed + in_flight for at in states.at), f"{sequence.key} keeps states"
        assert owners == self.pool.owners(), "the owners of slots are not the running sequences"

    def _take_back(self, sequence: Sequence, position: int) -> None:
        states = slots_of(sequence)
        slot = states.at.pop(position)
        if self.pool.is_published(slot):
            self.pool.release([slot])
        else:
            states.free.append(slot)

    def _publish(self, sequence: Sequence, end: int) -> None:
        states = slots_of(sequence)
        digest, slot = sequence.prefix.digests[end // self._page_size - 1], states.at[end]
        if self.pool.find(digest) is not None:
            return
        for listener in self.on_publish:
            listener(sequence, end, slot)
        spare = self.pool.acquire(1)  # without a free slot, the state stays private
        if spare:
            self.pool.publish(slot, digest)
            states.free += spare
