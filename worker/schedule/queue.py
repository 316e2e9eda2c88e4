"""The waiting sequences, and which of them joins next: first come, first served, with three exceptions.

Preempted sequences go before all others. The sequences of one prompt form a group (n > 1): the first one, the
leader, computes that prompt; the others, its followers, wait until it has, and then go to the front: they find its
pages in the prefix cache. Tenants share fairly, and within a tenant priority goes first (fair_queue.py).

Knows nothing of pages, budgets or time. Everything is O(1) a sequence while there is one tenant.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from worker.schedule.fair_queue import FairQueue
from worker.schedule.sequence import Sequence

GroupKey = tuple[bytes, int]  # (frontend id, group id)
WaitingSince = OrderedDict[Sequence, float]  # seconds


@dataclass(slots=True)
class _Group:
    leader: Sequence
    followers: WaitingSince = field(default_factory=OrderedDict)


class WaitingQueue:
    """groups: whether followers wait for their leader; without a prefix cache they would gain nothing.

    running: the sequences that run now, which the fair queue reads.
    """

    def __init__(self, groups: bool, running: Collection[Sequence] = ()) -> None:
        self.tokens = 0  # of all sequences in it
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
        """Number of sequences that were preempted."""
        return len(self._preempted)

    @property
    def fresh(self) -> int:
        """Number of sequences that never ran and wait for no leader."""
        return len(self._fresh)

    @property
    def oldest(self) -> float:
        """Since when the first of the fresh sequences waits; infinite without one."""
        return next(iter(self._fresh.values()), inf)

    @property
    def head(self) -> Sequence | None:
        return next(iter(self._preempted), None) or self.tenants.head

    def push(self, sequence: Sequence, now: float) -> None:
        """Adds a new sequence."""
        self.tokens += len(sequence.tokens)
        self.tenants.add_waiting(sequence)
        if self._uses_groups and sequence.group:
            group = self._groups.setdefault(_group_key(sequence), _Group(sequence))
            if group.leader is not sequence:
                group.followers[sequence] = now
                self._followers += 1
                return
        self._fresh[sequence] = now
        self.tenants.add_ready(sequence)

    def push_preempted(self, sequence: Sequence, now: float) -> None:
        """Adds a preempted sequence. Called from the newest to older ones, so that each goes to the front."""
        self.tokens += len(sequence.tokens)
        self.tenants.stop_running(sequence)
        self.tenants.add_waiting(sequence)
        self._preempted[sequence] = now
        self._preempted.move_to_end(sequence, last=False)

    def remove(self, sequence: Sequence) -> bool:
        """Removes a sequence that joins or leaves; False if it does not wait."""
        if not self._pop(sequence):
            return False
        self.tokens -= len(sequence.tokens)
        self.tenants.remove_waiting(sequence)
        return True

    def release_group(self, sequence: Sequence) -> None:
        """The sequence computed its prompt: if it is a leader, its followers go to the front."""
        group = self._groups.get(_group_key(sequence))
        if group is None or group.leader is not sequence:
            return
        del self._groups[_group_key(sequence)]
        self._followers -= len(group.followers)
        for follower, since in reversed(group.followers.items()):
            self._push_front(follower, since)

    def replace_leader(self, sequence: Sequence) -> None:
        """The sequence left for good: if it was a leader, its first follower leads now."""
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
        assert self.tokens == sum(len(sequence.tokens) for sequence in waiting), "waiting tokens are miscounted"
        for key, group in self._groups.items():
            assert group.leader not in group.followers, f"the leader of group {key} waits for itself"
        self.tenants.check(waiting, self._fresh.keys())

    def _pop(self, sequence: Sequence) -> bool:
        if self._preempted.pop(sequence, None) is not None:
            return True
        if self._fresh.pop(sequence, None) is not None:
            self.tenants.remove_ready(sequence)
            return True
        group = self._groups.get(_group_key(sequence)) if sequence.group else None
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
    return sequence.key[0], sequence.group
