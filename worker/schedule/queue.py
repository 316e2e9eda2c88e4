"""Who waits, and who comes next: first come, first served, with three exceptions.

Preempted sequences go before all others. Sequences of one prompt (a group, n > 1) wait aside until the first
of them, its leader, has computed that prompt, and then go to the front: they find its pages in the prefix cache.
Owners take turns, and within an owner priority goes first (turns.py).

Knows nothing of pages, budgets or time. Everything is O(1) a sequence while there is one owner.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from worker.schedule.fair_queue import FairQueue
from worker.schedule.sequence import Sequence

GroupKey = tuple[bytes, int]  # (frontend id, group id)
Line = OrderedDict[Sequence, float]  # since when each of them waits, seconds


@dataclass(slots=True)
class _Group:
    leader: Sequence
    aside: Line = field(default_factory=OrderedDict)


class Queue:
    """`groups`: whether the members of a group wait for its leader; without a prefix cache they would gain nothing.

    `running`: the sequences that run, which Turns looks at.
    """

    def __init__(self, groups: bool, running: Collection[Sequence] = ()) -> None:
        self.tokens = 0  # of all sequences in it
        self.turns = FairQueue(running)
        self._resuming: Line = OrderedDict()
        self._fresh: Line = OrderedDict()
        self._groups: dict[GroupKey, _Group] = {}
        self._aside = 0
        self._grouping = groups

    def __len__(self) -> int:
        return len(self._resuming) + len(self._fresh) + self._aside

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._resuming, self._fresh, *(group.aside for group in self._groups.values()))

    @property
    def resuming(self) -> int:
        return len(self._resuming)

    @property
    def fresh(self) -> int:
        """Sequences that never ran and wait for nobody."""
        return len(self._fresh)

    @property
    def oldest(self) -> float:
        """Since when the first waits that never ran; infinite without one."""
        return next(iter(self._fresh.values()), inf)

    @property
    def head(self) -> Sequence | None:
        return next(iter(self._resuming), None) or self.turns.head

    def push(self, sequence: Sequence, now: float) -> None:
        """Takes in a new sequence."""
        self.tokens += len(sequence.tokens)
        self.turns.wait(sequence)
        if self._grouping and sequence.group:
            group = self._groups.setdefault(_key(sequence), _Group(sequence))
            if group.leader is not sequence:
                group.aside[sequence] = now
                self._aside += 1
                return
        self._fresh[sequence] = now
        self.turns.ready(sequence)

    def resume(self, sequence: Sequence, now: float) -> None:
        """Takes a preempted sequence back. Called from the newest to older ones, so that each goes to the front."""
        self.tokens += len(sequence.tokens)
        self.turns.stop(sequence)
        self.turns.wait(sequence)
        self._resuming[sequence] = now
        self._resuming.move_to_end(sequence, last=False)

    def remove(self, sequence: Sequence) -> bool:
        """Takes out a sequence that joins or leaves; False if it does not wait."""
        if not self._take(sequence):
            return False
        self.tokens -= len(sequence.tokens)
        self.turns.leave(sequence)
        return True

    def prompt_done(self, sequence: Sequence) -> None:
        """A sequence computed its prompt: whoever waited aside for it may come."""
        group = self._groups.get(_key(sequence))
        if group is None or group.leader is not sequence:
            return
        del self._groups[_key(sequence)]
        self._aside -= len(group.aside)
        for sibling, since in reversed(group.aside.items()):
            self._to_front(sibling, since)

    def gone(self, sequence: Sequence) -> None:
        """A sequence left for good: if others waited aside for it, the first of them leads now."""
        group = self._groups.get(_key(sequence))
        if group is None or group.leader is not sequence:
            return
        if not group.aside:
            del self._groups[_key(sequence)]
            return
        group.leader, since = group.aside.popitem(last=False)
        self._aside -= 1
        self._to_front(group.leader, since)

    def check(self) -> None:
        """Raises AssertionError unless the counts agree and nobody waits in two places."""
        everyone = list(self)
        assert len(everyone) == len(set(everyone)) == len(self), "a sequence waits twice, or is not counted"
        assert self.tokens == sum(len(sequence.tokens) for sequence in everyone), "waiting tokens are miscounted"
        for key, group in self._groups.items():
            assert group.leader not in group.aside, f"the leader of group {key} waits for itself"
        self.turns.check(everyone, self._fresh.keys())

    def leaders(self) -> list[Sequence]:
        return [group.leader for group in self._groups.values()]

    def _take(self, sequence: Sequence) -> bool:
        if self._resuming.pop(sequence, None) is not None:
            return True
        if self._fresh.pop(sequence, None) is not None:
            self.turns.unready(sequence)
            return True
        group = self._groups.get(_key(sequence)) if sequence.group else None
        if group is None or sequence not in group.aside:
            return False
        del group.aside[sequence]
        self._aside -= 1
        return True

    def _to_front(self, sequence: Sequence, since: float) -> None:
        self._fresh[sequence] = since
        self._fresh.move_to_end(sequence, last=False)
        self.turns.ready(sequence, front=True)


def _key(sequence: Sequence) -> GroupKey:
    return sequence.key[0], sequence.group
