"""Whose turn it is among those that may come: fair between owners, by priority within one, then first come.

An owner (the name of an API key; "" where there are none) has an account of the tokens computed for it, and the one
with the least goes next: a virtual token counter, Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
Who comes after a pause starts no lower than those who wait already: a pause earns nothing, and costs nothing.

Charged are the tokens that a sequence has to compute when it joins, not those found in the prefix cache; its output
when it leaves, or as soon as somebody has to choose between owners while it runs. Where there is one owner nobody
ever chooses, and the order is that of arrival. Knows nothing of pages, steps and time.
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from worker.schedule.sequence import Sequence


@dataclass(slots=True)
class Account:
    """One owner's."""

    served: int = 0  # tokens
    running: int = 0  # sequences
    waiting: int = 0  # sequences, those that may not come yet included
    tokens: int = 0  # of those that wait
    lines: dict[int, OrderedDict[Sequence, None]] = field(default_factory=dict)  # who may come, by priority
    ranks: list[int] = field(default_factory=list)  # a heap of the priorities of those lines

    @property
    def first(self) -> Sequence | None:
        """Lines are left empty when their last one leaves, and put away here."""
        while self.ranks:
            line = self.lines[self.ranks[0]]
            if line:
                return next(iter(line))
            del self.lines[heapq.heappop(self.ranks)]
        return None

    def add(self, sequence: Sequence, *, front: bool) -> None:
        rank = sequence.priority
        if rank not in self.lines:
            self.lines[rank] = OrderedDict()
            heapq.heappush(self.ranks, rank)
        self.lines[rank][sequence] = None
        if front:
            self.lines[rank].move_to_end(sequence, last=False)


class FairQueue:
    """`running` is looked at whenever owners have to be compared: the sequences that run now."""

    def __init__(self, running: Collection[Sequence]) -> None:
        self._running = running
        self._accounts: dict[str, Account] = {}  # forgotten when nothing waits or runs
        self._ready: dict[str, Account] = {}  # those of whom somebody may come
        self._last: Account | None = None  # whose turn it was

    @property
    def head(self) -> Sequence | None:
        """Who comes next, by accounts as they were settled last."""
        if len(self._ready) > 1:
            return min(self._ready.values(), key=lambda account: account.served).first
        return next(iter(self._ready.values())).first if self._ready else None

    @property
    def needy(self) -> Sequence | None:
        """Who comes next of an owner of whom nothing runs, unless room was made for it before."""
        if len(self._accounts) < 2 or not self._ready:
            return None
        idle = [account for account in self._ready.values() if not account.running]
        first = min(idle, key=lambda account: account.served).first if idle else None
        return None if first is None or first.preempted_for else first

    def greedy(self, places: int) -> str | None:
        """The owner that runs most, if it runs more than its share of `places`, and more than one."""
        owners = [(account.running, name) for name, account in self._accounts.items() if account.running]
        sharing = sum(1 for account in self._accounts.values() if account.running or account.waiting)
        most, name = max(owners, default=(0, ""))
        return name if most > max(1.0, places / max(1, sharing)) else None

    def held(self, tenant: str) -> tuple[int, int]:
        """How many of an owner's sequences wait, and their tokens."""
        account = self._accounts.get(tenant)
        return (account.waiting, account.tokens) if account else (0, 0)

    # what happens to a sequence

    def wait(self, sequence: Sequence) -> None:
        """It waits from now on; ready() says when it may come."""
        account = self._accounts.setdefault(sequence.tenant, Account())
        account.waiting += 1
        account.tokens += len(sequence.tokens)

    def ready(self, sequence: Sequence, *, front: bool = False) -> None:
        """One that waits may come; `front`: before all others of its owner and priority."""
        tenant = sequence.tenant
        account = self._accounts[tenant]
        if tenant not in self._ready:
            if len(self._accounts) > 1:
                self._charge_running()
                last = self._last.served if self._last else 0
                account.served = max(account.served, min((one.served for one in self._ready.values()), default=last))
            self._ready[tenant] = account
        account.add(sequence, front=front)

    def unready(self, sequence: Sequence) -> None:
        """It does not come any more, or does now."""
        account = self._accounts[sequence.tenant]
        del account.lines[sequence.priority][sequence]
        if account.first is None:
            del self._ready[sequence.tenant]

    def leave(self, sequence: Sequence) -> None:
        """It waits no longer."""
        account = self._accounts[sequence.tenant]
        account.waiting -= 1
        account.tokens -= len(sequence.tokens)

    def join(self, sequence: Sequence) -> None:
        """It runs from now on."""
        account = self._last = self._accounts[sequence.tenant]
        account.running += 1
        account.served += len(sequence.tokens) - max(sequence.computed_tokens, sequence.charged_tokens)
        sequence.charged_tokens = len(sequence.tokens)

    def stop(self, sequence: Sequence) -> None:
        """It runs no longer."""
        account = self._accounts[sequence.tenant]
        account.running -= 1
        self._charge(sequence, account)

    def forget(self) -> None:
        """Nothing waits and nothing runs: nobody has an advantage to make up for."""
        self._accounts.clear()
        self._last = None

    def settle(self) -> None:
        """Before choosing: what those that run computed since."""
        if len(self._ready) > 1:
            self._charge_running()

    def _charge_running(self) -> None:
        for sequence in self._running:
            self._charge(sequence, self._accounts[sequence.tenant])

    def _charge(self, sequence: Sequence, account: Account) -> None:
        account.served += len(sequence.tokens) - sequence.charged_tokens
        sequence.charged_tokens = len(sequence.tokens)

    def check(self, waiting: Collection[Sequence], fresh: Collection[Sequence]) -> None:
        """Raises AssertionError unless the accounts agree with who waits, who may come, and who runs."""
        for name, account in self._accounts.items():
            own = [sequence for sequence in waiting if sequence.tenant == name]
            assert (account.waiting, account.tokens) == (len(own), sum(len(one.tokens) for one in own)), name
            assert account.running == sum(1 for one in self._running if one.tenant == name), f"{name}'s are miscounted"
            lined = {one for line in account.lines.values() for one in line}
            assert lined == {one for one in fresh if one.tenant == name}, f"{name}'s line has others than may come"
            assert bool(lined) == (name in self._ready), f"{name} is in turn without anybody to come, or not with"
        assert {one.tenant for one in (*waiting, *self._running)} <= self._accounts.keys(), "somebody has no account"
