"""Holds the waiting sequences and decides which joins next: first come, first served, with three exceptions.

1. Preempted sequences go before all others.
2. The sequences of one prompt form a group (n > 1). The first one, the leader, computes the prompt. The followers wait
   until the prompt is computed. Then they go to the front, because the prefix cache now has the leader's pages.
3. Tenants share fairly, and within a tenant, priority counts before arrival (fair_queue.py).

The queue knows nothing about pages, budgets or time. Every operation takes O(1) per sequence while there is one tenant.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from worker.schedule.fair_queue import FairQueue
from worker.schedule.sequence import Sequence

GroupKey = tuple[bytes, int]  # (frontend id, group id)
WaitingSince = OrderedDict[Sequence, float]  # since when each sequence waits, in seconds


@dataclass(slots=True)
class _Group:
    leader: Sequence
    followers: WaitingSince = field(default_factory=OrderedDict)


class WaitingQueue:
    """Holds the waiting sequences.

    groups: whether followers wait for their leader. Without a prefix cache, they would gain nothing by waiting.
    running: the sequences that run now. The fair queue reads them.
    """

    def __init__(self, groups: bool, running: Collection[Sequence] = ()) -> None:
        self.tokens = 0  # total tokens of the waiting sequences
        self.tenants = FairQueue(running)
        self._preempted: WaitingSince = OrderedDict()
        self._fresh: WaitingSince = OrderedDict()
        self._groups: dict[GroupKey, _Group] = {}
        self._followers = 0
        self._uses_groups = groups

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh) + self._followers

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._preempted, self._fresh, *(group.followers for group in self._groups.values()))

    @property
    def preempted(self) -> int:
        """How many of the waiting sequences were preempted."""
        return len(self._preempted)

    @property
    def fresh(self) -> int:
        """How many of the waiting sequences never ran and do not wait for a leader."""
        return len(self._fresh)

    @property
    def oldest(self) -> float:
        """Since when the first fresh sequence has been waiting; inf if there is none."""
        return next(iter(self._fresh.values()), inf)

    @property
    def head(self) -> Sequence | None:
        return next(iter(self._preempted), None) or self.tenants.head

    def push(self, sequence: Sequence, now: float) -> None:
        """Adds a new sequence."""
        self.tokens += sequence.known_len
        self.tenants.add_waiting(sequence)
        if self._uses_groups and sequence.turn.group:
            group = self._groups.setdefault(_group_key(sequence), _Group(sequence))
            if group.leader is not sequence:
                group.followers[sequence] = now
                self._followers += 1
                return
        self._fresh[sequence] = now
        self.tenants.add_ready(sequence)

    def push_preempted(self, sequence: Sequence, now: float) -> None:
        """Adds a preempted sequence at the front. To add several, call this from the newest to the oldest."""
        self.tokens += sequence.known_len
        self.tenants.stop_running(sequence)
        self.tenants.add_waiting(sequence)
        self._preempted[sequence] = now
        self._preempted.move_to_end(sequence, last=False)

    def remove(self, sequence: Sequence) -> bool:
        """Removes a sequence that joins or leaves. Returns False if the sequence does not wait."""
        if not self._pop(sequence):
            return False
        self.tokens -= sequence.known_len
        self.tenants.remove_waiting(sequence)
        return True

    def release_group(self, sequence: Sequence) -> None:
        """Moves the followers of a leader to the front. Called for each sequence whose prompt has been computed."""
        group = self._groups.get(_group_key(sequence))
        if group is None or group.leader is not sequence:
            return
        del self._groups[_group_key(sequence)]
        self._followers -= len(group.followers)
        for follower, since in reversed(group.followers.items()):
            self._push_front(follower, since)

    def replace_leader(self, sequence: Sequence) -> None:
        """Makes the first follower the new leader if `sequence` was a leader. Called when a sequence has ended."""
        group = self._groups.get(_group_key(sequence))
        if group is None or group.leader is not sequence:
            return
        if not group.followers:
            del self._groups[_group_key(sequence)]
            return
        group.leader, since = group.followers.popitem(last=False)
        self._followers -= 1
        self._push_front(group.leader, since)

    def leaders(self) -> list[Sequence]:
        return [group.leader for group in self._groups.values()]

    def check(self) -> None:
        """Raises AssertionError unless the counts agree and no sequence waits in two places."""
        waiting = list(self)
        assert len(waiting) == len(set(waiting)) == len(self), "a sequence waits twice, or is not counted"
        assert self.tokens == sum(sequence.known_len for sequence in waiting), "waiting tokens are miscounted"
        for key, group in self._groups.items():
            assert group.leader not in group.followers, f"the leader of group {key} waits for itself"
        self.tenants.check(waiting, self._fresh.keys())

    def _pop(self, sequence: Sequence) -> bool:
        if self._preempted.pop(sequence, None) is not None:
            return True
        if self._fresh.pop(sequence, None) is not None:
            self.tenants.remove_ready(sequence)
            return True
        group = self._groups.get(_group_key(sequence)) if sequence.turn.group else None
        if group is None or sequence not in group.followers:
            return False
        del group.followers[sequence]
        self._followers -= 1
        return True

    def _push_front(self, sequence: Sequence, since: float) -> None:
        self._fresh[sequence] = since
        self._fresh.move_to_end(sequence, last=False)
        self.tenants.add_ready(sequence, front=True)


def _group_key(sequence: Sequence) -> GroupKey:
    return sequence.key[0], sequence.turn.group
