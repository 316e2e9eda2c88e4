"""Limits what tenants with many sequences get of a step while another tenant has few.

A step ends at the same moment for all its sequences. So a tenant with one stream waits in every step for all rows
of a tenant with sixty: on a CPU, where a row costs almost as much as reading the weights, ten times as long as
alone. With several tenants, a step therefore has only as many tokens as it can compute in SHARE of the target or,
if that is longer, in the time that the decodes of the tenant with the fewest take alone, times the number of
tenants. Each stream of that tenant then has at least its equal part of the machine. Where rows cost little, as on
GPUs, all of them fit in this time, and nothing is limited.

The tenants share the tokens of such a step equally, and what one does not need is for the others. The decodes of a
tenant that has more than its share take turns, and half of its share is for its prompts if it has any. The prompts
of other tenants have what is left of StepTimePolicy's budget, unless a third tenant has only streams, which would wait
for them. The tenant with the fewest prompt tokens goes first; the others have their shares of the same step.

A tenant is protected from another one until it has been served LEAD tokens more (FairQueue), so that one which
keeps sending prompts does not hold up the streams of others for good. A tenant counts for some steps after its last
sequence, so that its next request does not begin behind a long step. Without API keys, there is one tenant.
"""

from collections.abc import Collection, Mapping
from math import inf

from worker.scheduler.queue import FairQueue
from worker.scheduler.sequence import Sequence
from worker.scheduler.step_time import MIN_PREFILL_TOKENS, StepTimePolicy

SHARE = 1 / 5  # of --target-step-s: a step of several tenants may always take as long
SEEN_STEPS = 50  # a tenant counts for as many steps after its last sequence
LEAD = 512  # tokens
LEAST_PROMPTS = 64  # prompt tokens that a step of several tenants may always have: short prompts go at once
MEASURED_EVERY = 32  # after this many limited steps, one has only the rows of the tenant with the fewest
SOON = 4  # the same if it is not known how long such a step takes


class TenantShares:
    """Decides which decodes a step has, and how many prompt tokens of each tenant.

    target: seconds of --target-step-s; inf: no limit. running: a live view of the running sequences.
    """

    def __init__(
        self, target: float, step_time: StepTimePolicy, tenants: FairQueue, running: Collection[Sequence]
    ) -> None:
        self._target, self._step_time, self._tenants, self._running = target, step_time, tenants, running
        self._seen: dict[str, int] = {}  # tenant → for how many steps it still counts as one that has sequences
        self._needed: dict[str, int] = {}  # tenant → tokens of prompts to compute
        self._shares: dict[str, int] = {}  # tenant → how many tokens it may have of a limited step
        self._left: dict[str, int] = {}  # tenant → prompt tokens that are left for it in this step; absent: no limit
        self._turns: dict[Sequence, None] = {}  # decodes of tenants above their share, in the order of their last turns
        self._unmeasured = 0  # limited steps since one had only the rows of the tenant with the fewest
        self.most = inf  # how many tokens the step has at most with drafts

    @property
    def crowded(self) -> bool:
        """Whether there are several tenants, or were a few steps ago."""
        return len(self._seen) > 1

    def affordable(self, decodes: list[Sequence], prompts: list[Sequence]) -> list[Sequence]:
        """Begins a step. Returns the decodes that it has, in the same order. prompts: the running ones"""
        self._left.clear()
        self.most = inf
        active = self._count_tenants()
        if not self.crowded:
            return decodes
        rows: dict[str, list[Sequence]] = {tenant: [] for tenant in self._seen}
        for one in decodes:
            rows[one.turn.tenant].append(one)
        self._needed = {tenant: self._tenants.waiting(tenant)[1] for tenant in active}
        for one in prompts:
            self._needed[one.turn.tenant] += one.uncomputed_tokens
        fewest = min(rows.values(), key=len)
        wanted = {tenant: len(own) + self._needed.get(tenant, 0) for tenant, own in rows.items()}
        tokens = self._tokens(len(fewest))
        self._shares = shares = _equal_shares(wanted, tokens)
        streaming = {tenant for tenant, own in rows.items() if own and wanted[tenant] <= shares[tenant]}
        streaming |= self._seen.keys() - active  # one that comes back should not wait for a long step
        over = self._not_behind([tenant for tenant, own in rows.items() if len(own) > shares[tenant]])
        if over and self._measures(fewest):
            self._left, self.most = dict.fromkeys(self._seen, 0), 0
            return fewest
        self.most = tokens if over else inf
        left_out = set[Sequence]()
        for tenant, share in shares.items():
            count = len(rows[tenant])
            if tenant in over:
                count = max(1, share - min(self._needed.get(tenant, 0), share // 2))
                left_out.update(self._waiting_turns(rows[tenant], count))
            if tenant in over or streaming - {tenant}:
                self._left[tenant] = max(1, share - count)
        self._turns = {one: None for one in self._turns if one in self._running}
        return [one for one in decodes if one not in left_out] if left_out else decodes

    def share_prompts(self, budget: int) -> None:
        """Divides the step's prompt tokens among the tenants that affordable() has not limited.

        The tenant that needs the fewest goes first, and the others have their shares of what it leaves, or a token.
        """
        needed = {tenant: count for tenant, count in self._needed.items() if count} if self.crowded else {}
        for tenant in needed.keys() & self._left.keys():
            budget -= min(needed.pop(tenant), self._left[tenant])
        behind = needed.keys() - self._not_behind(needed)
        for done, tenant in enumerate(sorted(needed, key=lambda one: (one not in behind, needed[one])), 1):
            share = budget if done == 1 else self._shares[tenant]
            self._left[tenant] = max(1, min(share, budget - (len(needed) - done)))
            budget -= min(needed[tenant], self._left[tenant])

    @property
    def least_prompts(self) -> int:
        """How many prompt tokens the step may always have."""
        return LEAST_PROMPTS if self.crowded else MIN_PREFILL_TOKENS

    def left(self, sequence: Sequence) -> float:
        """Returns how many prompt tokens the step may still have of the sequence's tenant."""
        return self._left.get(sequence.turn.tenant, inf)

    def count(self, sequence: Sequence, length: int) -> None:
        """Notes that the step has a chunk of a prompt."""
        if sequence.turn.tenant in self._left:
            self._left[sequence.turn.tenant] -= length

    def _count_tenants(self) -> set[str]:
        """Notes who has sequences. Returns the tenants with some that run, or are ready to."""
        if self._target == inf or not (self._tenants.several or self._seen):
            return set()
        active = {one.turn.tenant for one in self._running} | self._tenants.ready
        self._seen |= dict.fromkeys(active, SEEN_STEPS + 1)
        self._seen = {tenant: left - 1 for tenant, left in self._seen.items() if left > 1}
        return active

    def _tokens(self, fewest: int) -> int:
        """Returns how many tokens a limited step has. fewest: the decodes of the tenant with the fewest"""
        alone = self._step_time.decode_time(max(1, fewest))
        return self._step_time.tokens_within(max(SHARE * self._target, len(self._seen) * alone))

    def _not_behind(self, some: Collection[str]) -> set[str]:
        """Returns those of the tenants that may be limited: another one has not been served LEAD tokens more."""
        if not some:
            return set()
        served = self._tenants.served(self._seen)
        least = {tenant: min(served[one] for one in self._seen if one != tenant) for tenant in some}
        return {tenant for tenant in some if least[tenant] <= served[tenant] + LEAD}

    def _measures(self, fewest: list[Sequence]) -> bool:
        """Whether this step shows how long the rows of the tenant with the fewest take alone."""
        self._unmeasured += 1
        known = self._step_time.knows(len(fewest))
        if not fewest or self._unmeasured <= (MEASURED_EVERY if known else SOON):  # not every step, whatever is unknown
            return False
        self._unmeasured = 0
        return True

    def _waiting_turns(self, own: list[Sequence], count: int) -> list[Sequence]:
        """Returns the decodes of a tenant that wait, so that only `count` are left: those that had the latest turns."""
        present = set(own)
        turns = [*(one for one in own if one not in self._turns), *(one for one in self._turns if one in present)]
        for one in turns[:count]:
            self._turns.pop(one, None)
            self._turns[one] = None
        return turns[count:]


def _equal_shares(wanted: Mapping[str, int], tokens: int) -> dict[str, int]:
    """Divides tokens among tenants; what one does not want is for those that want more. Each has one at least."""
    shares = dict[str, int]()
    for tenant in sorted(wanted, key=wanted.__getitem__):
        shares[tenant] = max(1, tokens // (len(wanted) - len(shares)))
        tokens -= min(shares[tenant], wanted[tenant])
    return shares
