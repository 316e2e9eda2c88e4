"""Limits the time that a step spends on the host besides the forward, as step_time.py limits its prompt tokens.

A chain of samplers, a grammar or log-probabilities cost up to some tens of milliseconds for each row, and all sequences
of the step wait. On a CPU, so does a random draw from a large vocabulary: 1 to 13 ms. A step therefore has only so many
of these rows that they take STEP_S together, by their latest measured times. The other rows wait for a later step,
which changes no bit of them. Tenants have equal shares of this time, and what one does not need is for the others.
Within a tenant, rows that cost less than an equal share are in every step; the expensive ones take turns, beginning
with the one that has waited longest.

If several tenants have sequences, or had some a few steps ago, heavy rows of one (whose masks, chains or
log-probabilities take longer than HEAVY_S) may not make the steps of the others much longer than the forward: together
they get only as much time as the forward takes. A row that takes more than its tenant has left puts the tenant in debt,
and its heavy rows wait until enough steps have paid for it. A step always has at least one row, though. A heavy mask is
computed outside of the steps, and its row waits for it; such a row has no drafts, because each would need a mask.

Chunks of prompts have a limit of their own, so that neither kind keeps the other one out. In each kind, every tenant
may always have one row, so that every sequence advances. On a CPU, all prompts of a step together have at most LOGITS
logits, because computing them takes time, too, for which no row is measured. Drafts (drafts.py) use only what the
decodes leave.

A request whose prompt is scored often ends in its first step, so what its rows cost is assumed: as much as those of the
latest request that was measured. A new row with a chain is assumed to cost as much as one with the same chain, or else
a time for each sampler; a new draw as much as one with the same filters, or else a time for each token.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from shared.messages import SamplerChain, Sampling
from worker.scheduler.sequence import Chunk, Sequence
from worker.scheduler.step_time import Median
from worker.scheduler.tenant_shares import SEEN_STEPS

Kind = TypeVar("Kind")

# How long the host takes for the rows of a sequence, besides the forward: samplers, grammar masks, log-probabilities.
#
# The times are those of the latest rows. Before the first measurement, an assumed time stands for a row.

CHAIN_S = 0.01  # assumed for each sampler of a row's chain: of 152,000 tokens, a sampler takes 1 to 12 ms
SCORED_S = 0.002  # assumed for a row of a prompt with log-probabilities
CHECKED_S = 0.002  # assumed for a row of an answer that is checked: a draw from 152,000 tokens takes 2 ms
DRAWN_S = 13e-9  # assumed for a random draw on a CPU, for each token of the vocabulary
MANY_S = 0.02  # assumed for a row with more likeliest tokens than FEW, which are sorted
FEW = 128


@dataclass(slots=True)
class HostWork:
    """Seconds that the host takes for one row of a sequence.

    These belong to a row that is sampled:
        chain: its chain of samplers
        draw: its random draw on a CPU
        mask: the mask of its grammar
        rules: what its token rules change
        scores: its log-probabilities
    checked: draw and chain together, of a row of an answer that is checked
    prompt: of a row that scores a token of the prompt
    measured, chained, drawn: whether `prompt`, `chain` and `draw` were measured
    """

    chain: float = 0.0
    draw: float = 0.0
    mask: float = 0.0
    rules: float = 0.0
    scores: float = 0.0
    checked: float = 0.0
    prompt: float = 0.0
    measured: bool = False
    chained: bool = False
    drawn: bool = False

    @property
    def heavy(self) -> bool:
        """Whether a row takes unusually long. Draws do not count: the plainest request has them."""
        return self.masked_elsewhere or self.heavy_in_step

    @property
    def masked_elsewhere(self) -> bool:
        """Whether the mask takes so long that it is computed outside of the steps if there are other tenants."""
        return self.mask > HEAVY_S

    @property
    def heavy_in_step(self) -> bool:
        """Whether a row takes unusually long when such a mask is there."""
        return self.chain + self.rules + self.scores + (0.0 if self.masked_elsewhere else self.mask) > HEAVY_S

    @property
    def row(self) -> float:
        """Seconds for a row that is sampled."""
        return max(self.chain + self.draw, self.checked) + self.mask + self.rules + self.scores


def host_work(sampling: Sampling, *, checked: bool = False) -> HostWork | None:
    """Returns the work that the host has with a new sequence; None if it has hardly any.

    checked: whether an answer is compared with what the sequence would sample
    """
    chain, scores, prompt = sampling.chain, sampling.logprobs, sampling.prompt_logprobs
    if not (
        checked or chain is not None or prompt or scores is not None or sampling.grammar or sampling.has_token_rules
    ):
        return None
    samplers = 0 if chain is None else max(1, len(chain.order))
    return HostWork(
        chain=CHAIN_S * samplers,
        scores=MANY_S if (scores or 0) > FEW else 0.0,
        checked=CHECKED_S if checked else 0.0,
        prompt=SCORED_S if prompt else 0.0,
    )


def decodes_host_s(chunks: Iterable[Chunk]) -> float:
    """Returns the seconds that the host takes for the rows of decodes without their drafts."""
    return sum([chunk.sequence.host.row for chunk in chunks if chunk.sequence.host is not None])


def drafts_host_s(chunks: Iterable[Chunk]) -> float:
    """Returns the seconds that the host takes for the rows after drafts."""
    return sum([len(one.drafts) * one.sequence.host.row for one in chunks if one.sequence.host is not None])


HEAVY_S = 0.003  # a mask of 152,000 tokens usually takes 0.05 to 0.5 ms
COPIED_S = 1e-6  # for a mask that is there
LEAST_HEAVY_S = 0.005  # for all heavy rows in a step with other tenants, if the forward takes less
STEP_S = 0.1  # for the rows of all decodes in a step
PREFILL_S = 0.05  # for the rows of all prompts in a step
MOST_KINDS = 64  # chains whose times are known, and the same of kinds of draws
LOGITS = 8 << 20  # logits of all prompts in a step on a CPU: 55 rows of 152,000 tokens
LEAST_ROWS = 8  # which any step may have
COUNTED_S = 1e-4  # draws that take less than this are not counted
DECAY = 0.9  # what a kind of draws is assumed to cost falls by no more than this from one new row to the next


class HostBudget:
    """Decides which rows with work for the host are in the next step.

    vocab_size: of a model on a CPU; 0 on a GPU, which computes logits and draws itself
    """

    def __init__(self, vocab_size: int = 0) -> None:
        self._draw_s = DRAWN_S * vocab_size if DRAWN_S * vocab_size >= COUNTED_S else 0.0
        self._most_rows = max(LEAST_ROWS, LOGITS // vocab_size) if vocab_size else 1 << 62
        self._left = PREFILL_S  # seconds that are left for prompts in the step that is being planned
        self._rows_left = self._most_rows  # rows of logits that are left for them
        self._used = set[str]()  # the tenants whose prompts have work for the host in this step
        self._scored_s = SCORED_S  # the latest measured time for a scored row of a prompt
        self._unmeasured = deque[HostWork](maxlen=64)  # prompts that were planned with an assumed time
        self._chains: _Assumed[SamplerChain] = _Assumed(0.0)  # by the whole chain
        self._draws: _Assumed[tuple[bool, bool, bool]] = _Assumed(DECAY)  # by the filters of plain sampling
        self._forward = Median()  # seconds of a step of decodes without the host's work for their rows
        self._seen: dict[str, int] = {}  # tenant → for how many steps it still counts as one that has sequences
        self.masked: list[Sequence] = []  # whose masks are computed outside of the step that was planned last
        self._credit: dict[str, float] = {}  # tenant → seconds that its heavy rows may take; negative: a debt

    def entered(self, sequence: Sequence) -> None:
        """Gives a new sequence its HostWork if it has none, but is drawn at random on a CPU."""
        if self._draw_s and sequence.sampling.temperature and sequence.check is None:
            sequence.host = sequence.host or HostWork()
            sequence.host.draw = self._draw_s

    def computed(self, seconds: float, chunks: Iterable[Chunk]) -> None:
        """Notes how long a step took that had only decodes, without its drafts."""
        self._forward.add(max(0.0, seconds - decodes_host_s(chunks)))

    def affordable(self, decodes: list[Sequence], running: Iterable[Sequence] = ()) -> list[Sequence]:
        """Begins a step. Returns the decodes that it may have, in the same order. running: also those without one"""
        self._left, self._rows_left = PREFILL_S, self._most_rows
        self._used.clear()
        self.masked = []
        self._learn()
        costs = {one: self._row(one, one.host) for one in decodes if one.host is not None}
        self._count_tenants(costs, running or decodes)
        masked = {one for one in costs if self._waits_for_mask(one)}  # the mask of each wakes the loop
        if masked and not self.crowded:
            decodes = [one for one in decodes if one not in masked]
            costs = {one: cost for one, cost in costs.items() if one not in masked}
        if self.crowded:
            costs = {one: self._in_step(one, cost) for one, cost in costs.items() if one not in masked}
            waits = self._waiting(costs)
            if waits and len(waits) == len(decodes):  # a step without rows would not bring the next one
                waits.remove(min(waits, key=lambda one: one.history.last_token or one.history.arrival))
            waits |= masked
            decodes = [one for one in decodes if one not in waits]
            costs = {one: cost for one, cost in costs.items() if one not in waits}
        if sum(costs.values()) <= STEP_S:
            return decodes
        tenants: dict[str, dict[Sequence, float]] = {}
        for one, cost in costs.items():
            tenants.setdefault(one.turn.tenant, {})[one] = cost
        chosen, left = set[Sequence](), STEP_S
        ascending = sorted(tenants.values(), key=lambda own: sum(own.values()))
        for done, own in enumerate(ascending):
            served = _served(own, left / (len(ascending) - done))
            chosen.update(served)
            left -= sum([own[one] for one in served])
        return [one for one in decodes if one.host is None or one in chosen]

    @property
    def crowded(self) -> bool:
        """Whether there are heavy rows, and several tenants."""
        return len(self._seen) > 1

    def _count_tenants(self, costs: dict[Sequence, float], running: Iterable[Sequence]) -> None:
        """Notes who has sequences, if there are heavy rows."""
        if not any([one.host is not None and one.host.heavy for one in costs]):
            self._seen.clear()
            self._credit.clear()
            return
        self._seen |= {one.turn.tenant: SEEN_STEPS for one in running}
        self._seen = {tenant: left - 1 for tenant, left in self._seen.items() if left}
        if len(self._seen) < 2:
            self._credit.clear()

    def _waits_for_mask(self, sequence: Sequence) -> bool:
        """Whether a row must wait for its mask, which is computed outside of the steps. Begins to compute it."""
        constraint = sequence.constraint
        if constraint is None or sequence.history.crashes:
            return False
        if self._is_masked_elsewhere(sequence):
            waits = not constraint.prepare(sequence.turn.tenant)
        else:  # a mask that was begun beside tenants who have left since, by a thread of low priority
            waits = constraint.is_computed
        if not waits:
            return False
        self.masked.append(sequence)
        return True

    def _in_step(self, sequence: Sequence, cost: float) -> float:
        """Returns what a row with this cost costs in a step, if its mask may have been computed before."""
        host = sequence.host
        return cost if host is None or not self._is_masked_elsewhere(sequence) else max(COPIED_S, cost - host.mask)

    def _is_masked_elsewhere(self, sequence: Sequence) -> bool:
        """False if the sequence is suspected of having crashed a worker: all it does is done in steps of its own."""
        host = sequence.host
        return self.crowded and host is not None and host.masked_elsewhere and not sequence.history.crashes

    def _waiting(self, costs: dict[Sequence, float]) -> set[Sequence]:
        """Returns the sequences whose heavy rows wait. costs: seconds of rows, without masks that are there"""
        heavy: dict[str, dict[Sequence, float]] = {}
        for one, cost in costs.items():
            if one.host is not None and one.host.heavy_in_step:
                heavy.setdefault(one.turn.tenant, {})[one] = cost
        if not heavy:
            return set()
        share = min(STEP_S, max(LEAST_HEAVY_S, self._forward.value)) / len(heavy)
        self._credit = {tenant: min(share, self._credit.get(tenant, 0.0) + share) for tenant in heavy}
        waits = set[Sequence]()
        for tenant, own in heavy.items():
            served = _served(own, self._credit[tenant]) if self._credit[tenant] > 0 else []
            self._credit[tenant] -= sum([own[one] for one in served])
            waits.update(own.keys() - served)
        return waits

    def fitting(self, sequence: Sequence, length: int, known: int, *, samples: bool) -> int:
        """Returns how much of a chunk the step can have, and counts its rows.

        length: the chunk's tokens; known: how many tokens until the first id is sampled, if `samples`
        """
        host = sequence.host
        if host is None or not length:
            return length
        if host.prompt and not host.measured and sequence.sampling.prompt_top <= FEW:
            host.prompt = self._scored_s
            self._unmeasured.append(host)
        length = self._scored(sequence, host, length)
        rows, row = length - known + 1 if samples else 0, self._row(sequence, host)
        if rows > 0 and row:
            row = self._in_step(sequence, row)
            most = 0 if self._waits_for_mask(sequence) else self._most(sequence, row)
            splits_image = most == 0 and sequence.images is not None  # whose last row must not be missing
            if rows > most and not splits_image:
                length -= rows - most
                rows = most
            self._count(sequence, rows, row)
            if rows > 0:
                self._await_times(sequence.sampling, host)
        return length

    def _row(self, sequence: Sequence, host: HostWork) -> float:
        """Returns the seconds of a row that is sampled. What was not measured is taken from the latest of its kind."""
        if host.chain and not host.chained and sequence.sampling.chain is not None:
            host.chain = self._chains.seconds(sequence.sampling.chain, host.chain)
        if host.draw and not host.drawn:
            host.draw = self._draws.seconds(_filters(sequence.sampling), host.draw)
        return host.row

    def _await_times(self, sampling: Sampling, host: HostWork) -> None:
        """Notes a row whose times stand for its kind as soon as they are measured."""
        if sampling.chain is not None and not host.chained:
            self._chains.awaited.append((sampling.chain, host))
        if host.draw and not host.drawn:
            self._draws.awaited.append((_filters(sampling), host))

    def _learn(self) -> None:
        for _ in range(len(self._unmeasured)):
            host = self._unmeasured.popleft()
            if host.measured:
                self._scored_s = host.prompt
            else:
                self._unmeasured.append(host)
        self._chains.learn(lambda host: host.chain if host.chained else None)
        self._draws.learn(lambda host: host.draw if host.drawn else None)

    def _scored(self, sequence: Sequence, host: HostWork, length: int) -> int:
        if host.prompt:
            length = min(length, self._most(sequence, host.prompt))
            self._count(sequence, length, host.prompt)
        return length

    def _most(self, sequence: Sequence, cost: float) -> int:
        """Returns how many rows of a prompt the step can have."""
        most = min(int(self._left / cost), self._rows_left) if self._left > 0 else 0
        return max(most, sequence.turn.tenant not in self._used)

    def _count(self, sequence: Sequence, rows: int, cost: float) -> None:
        if rows > 0:
            self._used.add(sequence.turn.tenant)
            self._left -= rows * cost
            self._rows_left -= rows


def _served(costs: dict[Sequence, float], left: float) -> list[Sequence]:
    """Returns which decodes of a tenant are in the step. left: the seconds for its rows; one row is always allowed"""
    chosen = list[Sequence]()
    ascending = sorted(costs, key=costs.__getitem__)
    for done, one in enumerate(ascending):
        if costs[one] > left / (len(ascending) - done):
            break
        chosen.append(one)
        left -= costs[one]
    turns = sorted(ascending[len(chosen) :], key=lambda one: one.history.last_token or one.history.arrival)
    for at, one in enumerate(turns):
        if at and costs[one] > left:
            break
        chosen.append(one)
        left -= costs[one]
    return chosen


def _filters(sampling: Sampling) -> tuple[bool, bool, bool]:
    return sampling.top_k > 0, sampling.top_p < 1, sampling.min_p > 0


class _Assumed(Generic[Kind]):
    """What a new row of each kind is assumed to cost: as much as the latest measured one.

    decay: a lower measurement reduces the assumed time to this part of it at most. awaited: rows without a time yet
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._seconds: dict[Kind, float] = {}
        self.awaited = deque[tuple[Kind, HostWork]](maxlen=MOST_KINDS)

    def seconds(self, kind: Kind, otherwise: float) -> float:
        return self._seconds.get(kind, otherwise)

    def learn(self, measured: Callable[[HostWork], float | None]) -> None:
        """Reads the rows that have been measured. measured: the seconds of a row; None if they are not known yet"""
        for _ in range(len(self.awaited)):
            kind, host = self.awaited.popleft()
            seconds = measured(host)
            if seconds is None:
                self.awaited.append((kind, host))
                continue
            self._seconds[kind] = max(seconds, self._decay * self._seconds.pop(kind, 0.0))
            if len(self._seconds) > MOST_KINDS:
                del self._seconds[next(iter(self._seconds))]
