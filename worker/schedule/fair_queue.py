"""Decides which ready sequence joins next: orders tenants fairly, and within a tenant by priority, then by arrival.

A tenant is the name of an API key, or "" if there are no keys. Each tenant has an account that counts the tokens
computed for it, and the tenant with the lowest count goes next. This is a virtual token counter: Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024. A tenant that returns after a pause starts no lower than the
waiting tenants, so a pause brings neither an advantage nor a disadvantage.

When a sequence joins, its tenant's account is charged with the tokens to compute, without those found in the prefix
cache. The output is charged when the sequence stops running, or earlier if tenants have to be compared. If there is
only one tenant, sequences go by priority, then arrival. This module knows nothing about pages, steps and time.

A waiting sequence is ready unless it was preempted or waits for the leader of its group (queue.py).
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from worker.schedule.sequence import Sequence


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
