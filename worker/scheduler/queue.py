"""Holds the waiting sequences and decides which joins next: first come, first served, with three exceptions.

1. Preempted sequences go before all others.
2. The sequences of one prompt form a group (n > 1). The first one, the leader, computes the prompt. The followers wait
   until the prompt is computed. Then they go to the front, because the prefix cache now has the leader's pages.
3. Tenants share fairly, and within a tenant, priority counts before arrival (see FairQueue).

The queue knows nothing about pages, budgets or time. Every operation takes O(1) per sequence while there is one tenant.
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from shared.messages import Refusal
from worker.scheduler.paging import Paging
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.sequence import Sequence

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


# Decides which ready sequence joins next: orders tenants fairly, and within a tenant by priority, then by arrival.
#
# A tenant is the name of an API key, or "" if there are no keys. Each tenant has an account that counts the tokens
# computed for it, and the tenant with the lowest count goes next. This is a virtual token counter: Sheng et al.,
# "Fairness in Serving Large Language Models", OSDI 2024. A tenant that returns after a pause starts no lower than the
# waiting tenants, so a pause brings neither an advantage nor a disadvantage.
#
# When a sequence joins, its tenant's account is charged with the tokens to compute, without those found in the prefix
# cache. The output is charged when the sequence stops running, or earlier if tenants have to be compared. If there is
# only one tenant, sequences go by priority, then arrival. This part knows nothing about pages, steps and time.
#
# A waiting sequence is ready unless it was preempted or waits for the leader of its group.


@dataclass(slots=True)
class Account:
    """The counts and the ready sequences of one tenant."""

    served: int = 0  # tokens computed for the tenant
    running: int = 0  # the number of running sequences
    waiting: int = 0  # the number of waiting sequences, ready or not
    waiting_tokens: int = 0
    ready: dict[int, OrderedDict[Sequence, None]] = field(default_factory=dict)  # priority → sequences, next first
    priorities: list[int] = field(default_factory=list)  # a heap of the keys of `ready`

    @property
    def head(self) -> Sequence | None:
        """The first ready sequence of the tenant. Reading this property also deletes empty queues of priorities."""
        while self.priorities:
            queue = self.ready[self.priorities[0]]
            if queue:
                return next(iter(queue))
            del self.ready[heapq.heappop(self.priorities)]
        return None

    def add(self, sequence: Sequence, *, front: bool) -> None:
        priority = sequence.turn.priority
        if priority not in self.ready:
            self.ready[priority] = OrderedDict()
            heapq.heappush(self.priorities, priority)
        self.ready[priority][sequence] = None
        if front:
            self.ready[priority].move_to_end(sequence, last=False)


class FairQueue:
    """Orders the ready sequences of all tenants.

    running: the sequences that run now. The queue reads them when it has to compare tenants.
    """

    def __init__(self, running: Collection[Sequence]) -> None:
        self._running = running
        self._accounts: dict[str, Account] = {}  # the accounts of all tenants since clear()
        self._ready: dict[str, Account] = {}  # the accounts of tenants with a ready sequence
        self._last: Account | None = None  # the account of the sequence that joined last

    @property
    def head(self) -> Sequence | None:
        """The sequence that joins next, according to the accounts as last charged."""
        if len(self._ready) > 1:
            return min(self._ready.values(), key=lambda account: account.served).head
        return next(iter(self._ready.values())).head if self._ready else None

    @property
    def several(self) -> bool:
        """Whether there have been several tenants since the last moment without sequences."""
        return len(self._accounts) > 1

    @property
    def ready(self) -> Set[str]:
        """The tenants with a ready sequence."""
        return self._ready.keys()

    @property
    def starved(self) -> Sequence | None:
        """The next ready sequence of a tenant that has no running sequence, if there is one.

        None also if running sequences were already preempted once to admit that sequence.
        """
        if len(self._accounts) < 2 or not self._ready:
            return None
        idle = [account for account in self._ready.values() if not account.running]
        head = min(idle, key=lambda account: account.served).head if idle else None
        return None if head is None or head.turn.preempted_for else head

    def over_share(self, places: int) -> str | None:
        """Returns the tenant with the most running sequences, if it has more than one and more than its fair share.

        places: how many sequences may run. A fair share is `places` divided by the number of active tenants.
        """
        running = [(account.running, name) for name, account in self._accounts.items() if account.running]
        sharing = sum(1 for account in self._accounts.values() if account.running or account.waiting)
        most, name = max(running, default=(0, ""))
        return name if most > max(1.0, places / max(1, sharing)) else None

    def served(self, tenants: Iterable[str]) -> dict[str, int]:
        """Returns how many tokens have been computed for each of the tenants; 0 for one without an account."""
        self._charge_all()
        return {name: self._accounts[name].served if name in self._accounts else 0 for name in tenants}

    def waiting(self, tenant: str) -> tuple[int, int]:
        """Returns the number of waiting sequences of a tenant, and the number of their tokens."""
        account = self._accounts.get(tenant)
        return (account.waiting, account.waiting_tokens) if account else (0, 0)

    # Events

    def add_waiting(self, sequence: Sequence) -> None:
        account = self._accounts.setdefault(sequence.turn.tenant, Account())
        account.waiting += 1
        account.waiting_tokens += sequence.known_len

    def remove_waiting(self, sequence: Sequence) -> None:
        account = self._accounts[sequence.turn.tenant]
        account.waiting -= 1
        account.waiting_tokens -= sequence.known_len

    def add_ready(self, sequence: Sequence, *, front: bool = False) -> None:
        """Makes a waiting sequence ready to join. front: put it first of its tenant and priority."""
        tenant = sequence.turn.tenant
        account = self._accounts[tenant]
        if tenant not in self._ready:
            if len(self._accounts) > 1:
                self._charge_all()
                last = self._last.served if self._last else 0
                account.served = max(account.served, min((one.served for one in self._ready.values()), default=last))
            self._ready[tenant] = account
        account.add(sequence, front=front)

    def remove_ready(self, sequence: Sequence) -> None:
        """Removes a ready sequence that joins or was aborted."""
        account = self._accounts[sequence.turn.tenant]
        del account.ready[sequence.turn.priority][sequence]
        if account.head is None:
            del self._ready[sequence.turn.tenant]

    def start_running(self, sequence: Sequence) -> None:
        account = self._last = self._accounts[sequence.turn.tenant]
        account.running += 1
        account.served += len(sequence.tokens) - max(sequence.computed_tokens, sequence.turn.charged_tokens)
        sequence.turn.charged_tokens = len(sequence.tokens)

    def stop_running(self, sequence: Sequence) -> None:
        account = self._accounts[sequence.turn.tenant]
        account.running -= 1
        _charge(sequence, account)

    def clear(self) -> None:
        """Deletes all accounts. Called when no sequence waits or runs, so that no tenant is ahead of another."""
        self._accounts.clear()
        self._last = None

    def charge_running(self) -> None:
        """Charges the tokens that running sequences have computed since they were last charged.

        Called before a choice between tenants.
        """
        if len(self._ready) > 1:
            self._charge_all()

    def _charge_all(self) -> None:
        for sequence in self._running:
            _charge(sequence, self._accounts[sequence.turn.tenant])

    def check(self, waiting: Collection[Sequence], ready: Collection[Sequence]) -> None:
        """Raises AssertionError unless the accounts agree with the waiting, the ready and the running sequences."""
        for name, account in self._accounts.items():
            own = [sequence for sequence in waiting if sequence.turn.tenant == name]
            counts = len(own), sum(sequence.known_len for sequence in own)
            assert (account.waiting, account.waiting_tokens) == counts, f"{name}'s waiting sequences are miscounted"
            running = sum(1 for sequence in self._running if sequence.turn.tenant == name)
            assert account.running == running, f"{name}'s running sequences are miscounted"
            queued = {sequence for queue in account.ready.values() for sequence in queue}
            assert queued == {one for one in ready if one.turn.tenant == name}, (
                f"{name}'s queue has others than the ready"
            )
            assert bool(queued) == (name in self._ready), f"{name} takes part without a ready sequence, or not with one"
        assert {one.turn.tenant for one in (*waiting, *self._running)} <= self._accounts.keys(), (
            "a tenant has no account"
        )


def _charge(sequence: Sequence, account: Account) -> None:
    account.served += len(sequence.tokens) - sequence.turn.charged_tokens
    sequence.turn.charged_tokens = len(sequence.tokens)


# Decides which sequences are accepted at all. Scheduler.plan() decides everything else about them.

RESERVED_SHARE = 8  # 1 / RESERVED_SHARE of the queue is kept for tenants with few or no requests in it


class Refused(Exception):
    """The sequence is not accepted. The client gets `reason` and the message."""

    reason = Refusal.INVALID


class QueueFull(Refused):
    reason = Refusal.QUEUE_FULL


class TooLong(Refused):
    reason = Refusal.TOO_LONG


def check_possible(sequence: Sequence, config: SchedulerConfig, paging: Paging) -> None:
    """Raises Refused if the sequence could not finish even if it were alone on the worker."""
    if sequence.prompt_len < 1 or sequence.output_len < 0:
        raise Refused("`prompt` is empty")
    tokens = sequence.known_len
    longest = sequence.prompt_len + sequence.sampling.max_tokens
    if max(longest, tokens) > config.max_seq_len:
        raise TooLong(f"`prompt` and `max_tokens` are {longest} tokens, but at most {config.max_seq_len} are possible")
    if not paging.fits(max(longest - 1, tokens)):  # the K/V of the last token is never needed
        raise TooLong(f"`prompt` and `max_tokens` are {longest} tokens, which is more than the K/V pool can hold")


def check_queue(sequence: Sequence, config: SchedulerConfig, queue: WaitingQueue, running: int) -> None:
    """Raises QueueFull if too many sequences or tokens wait, or if the tenant has more than its share of the queue.

    A sequence is always accepted if no sequence waits and running sequences do not fill a batch.
    """
    waiting = len(queue)
    if waiting >= config.max_waiting_requests and (waiting or running >= config.max_batch_size):
        raise QueueFull(f"{waiting} requests are waiting, and at most {config.max_waiting_requests} may wait")
    if waiting and 0 < config.max_waiting_tokens < queue.tokens + sequence.known_len:
        raise QueueFull(f"{queue.tokens} prompt tokens are waiting, and at most {config.max_waiting_tokens} may wait")
    if sequence.turn.tenant:
        _check_share(sequence, config, queue)


def _check_share(sequence: Sequence, config: SchedulerConfig, queue: WaitingQueue) -> None:
    """Raises QueueFull if the tenant's waiting requests or tokens are at least seven times the free space of the queue.

    One waiting request per tenant is always allowed. One tenant alone can therefore fill seven eighths of the queue,
    and two tenants can fill nearly half of it each. A new tenant always finds a place.
    """
    requests, tokens = queue.tenants.waiting(sequence.turn.tenant)
    ratio = RESERVED_SHARE - 1
    if requests and requests >= ratio * (config.max_waiting_requests - len(queue) - 1):
        raise QueueFull(
            f"{requests} requests of {sequence.turn.tenant} are waiting; other places are kept for other keys"
        )
    free = config.max_waiting_tokens - queue.tokens - sequence.known_len
    if requests and config.max_waiting_tokens and tokens >= ratio * free:
        raise QueueFull(
            f"{tokens} prompt tokens of {sequence.turn.tenant} are waiting; the rest is kept for other keys"
        )
