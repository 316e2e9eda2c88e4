"""Limits the time that a step spends on the host besides the forward, as step_time.py limits its prompt tokens.

A chain of samplers, a grammar or log-probabilities cost up to some tens of milliseconds for each row, and all sequences
of the step wait. A step therefore has only so many of these rows that they take STEP_S together, by their latest
measured times. The other rows wait for a later step, which changes no bit of them. Rows that cost less than an equal
share are in every step; the expensive ones take turns, beginning with the one that has waited longest.

Chunks of prompts have a limit of their own, so that neither kind keeps the other one out. Each kind may always have one
row, so that every sequence advances.

A request whose prompt is scored often ends in its first step, so what its rows cost is assumed: as much as those of the
latest request that was measured. A new row with a chain is assumed to cost as much as one with the same chain, or else
a time for each sampler.
"""

from collections import deque
from dataclasses import dataclass

from shared.messages import SamplerChain, Sampling
from worker.scheduler.sequence import Sequence

# How long the host takes for the rows of a sequence, besides the forward: samplers, grammar masks, log-probabilities.
#
# The times are those of the latest rows. Before the first measurement, an assumed time stands for a row.

CHAIN_S = 0.01  # assumed for each sampler of a row's chain: of 152,000 tokens, a sampler takes 1 to 12 ms
SCORED_S = 0.002  # assumed for a row of a prompt with log-probabilities
CHECKED_S = 0.002  # assumed for a row of an answer that is checked: a draw from 152,000 tokens takes 2 ms
MANY_S = 0.02  # assumed for a row with more likeliest tokens than FEW, which are sorted
FEW = 128


@dataclass(slots=True)
class HostWork:
    """Seconds that the host takes for one row of a sequence.

    chain, mask, scores: for a row that is sampled: its chain of samplers, the mask of its grammar or token rules, its
    log-probabilities. checked: for a row of an answer that is checked, whose rows are all sampled in one step: the draw
    and the chain together. prompt: for a row that scores a token of the prompt. measured, chained: whether `prompt` and
    `chain` were measured
    """

    chain: float = 0.0
    mask: float = 0.0
    scores: float = 0.0
    checked: float = 0.0
    prompt: float = 0.0
    measured: bool = False
    chained: bool = False

    @property
    def row(self) -> float:
        """Seconds for a row that is sampled."""
        return max(self.chain, self.checked) + self.mask + self.scores


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


STEP_S = 0.1  # for the rows of all decodes in a step
PREFILL_S = 0.05  # for the rows of all prompts in a step
MOST_CHAINS = 64  # chains whose times are known


class HostBudget:
    """Decides which rows with work for the host are in the next step."""

    def __init__(self) -> None:
        self._left = PREFILL_S  # seconds that are left for prompts in the step that is being planned
        self._used = False  # whether a prompt of this step has work for the host
        self._scored_s = SCORED_S  # the latest measured time for a scored row of a prompt
        self._unmeasured = deque[HostWork](maxlen=64)  # prompts that were planned with an assumed time
        self._unmeasured_chains = deque[tuple[SamplerChain, HostWork]](maxlen=MOST_CHAINS)
        self._chains: dict[SamplerChain, float] = {}  # chain → the latest measured time for a new row

    def affordable(self, decodes: list[Sequence]) -> list[Sequence]:
        """Begins a step. Returns the decodes that it may have, in the same order."""
        self._left, self._used = PREFILL_S, False
        self._learn()
        costs = {one: one.host.row for one in decodes if one.host is not None}
        if sum(costs.values()) <= STEP_S:
            return decodes
        chosen, left = set[Sequence](), STEP_S
        ascending = sorted(costs, key=costs.__getitem__)
        for done, one in enumerate(ascending):
            if costs[one] > left / (len(ascending) - done):
                break
            chosen.add(one)
            left -= costs[one]
        turns = sorted(ascending[len(chosen) :], key=lambda one: one.history.last_token)
        for at, one in enumerate(turns):
            if at and costs[one] > left:
                break
            chosen.add(one)
            left -= costs[one]
        return [one for one in decodes if one.host is None or one in chosen]

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
        if sequence.sampling.chain is not None and not host.chained:
            host.chain = self._chains.get(sequence.sampling.chain, host.chain)
        length = self._scored(host, length)
        rows = length - known + 1 if samples else 0
        if rows > 0 and host.row:
            most = int(self._left / host.row) if self._left > 0 else 0
            most = max(most, not self._used)
            splits_picture = most == 0 and sequence.pictures is not None  # whose last row must not be missing
            if rows > most and not splits_picture:
                length -= rows - most
                rows = most
            self._used |= rows > 0
            self._left -= rows * host.row
            if rows > 0 and sequence.sampling.chain is not None and not host.chained:
                self._unmeasured_chains.append((sequence.sampling.chain, host))
        return length

    def _learn(self) -> None:
        for _ in range(len(self._unmeasured)):
            host = self._unmeasured.popleft()
            if host.measured:
                self._scored_s = host.prompt
            else:
                self._unmeasured.append(host)
        for _ in range(len(self._unmeasured_chains)):
            chain, host = self._unmeasured_chains.popleft()
            if host.chained:
                self._chains.pop(chain, None)
                self._chains[chain] = host.chain
                if len(self._chains) > MOST_CHAINS:
                    del self._chains[next(iter(self._chains))]
            else:
                self._unmeasured_chains.append((chain, host))

    def _scored(self, host: HostWork, length: int) -> int:
        if host.prompt:
            most = int(self._left / host.prompt) if self._left > 0 else 0
            length = min(length, max(most, not self._used))
            self._used |= length > 0
            self._left -= length * host.prompt
        return length
