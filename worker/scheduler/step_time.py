"""Limits the prompt tokens of a step with decodes, based on how long earlier steps took.

The duration of a step is modelled as the time of its decodes alone, plus a time for each prompt token. If the time of
the decodes is estimated too low, the time of the prompt tokens is measured too high by as much, because it is the rest
of the measured step. The target limits the sum of both, and the sum stays right.

The estimates are medians of the last few steps, so a single slow step (a stopped process, memory touched for the first
time) changes nothing. The caller passes `now`.
"""

from collections import defaultdict, deque
from math import inf
from typing import NamedTuple

from shared import messages as m
from worker.scheduler.sequence import TILE

MIN_PREFILL_TOKENS = 32  # a step may always have this many prompt tokens, so that prompts always advance
MIN_PREFILL_RATIO = 3  # prefill may always take this many times as long as the shortest step


class _Step(NamedTuple):
    planned: float  # when the step was planned, in seconds
    chunks: int
    decodes: int
    prompt_tokens: int
    proposing: float  # seconds of the step that a draft model has taken


class StepTimePolicy:
    """Limits the prompt tokens of steps. target: the maximum seconds of a step with decodes; inf: no limit."""

    def __init__(self, target: float, max_step_tokens: int) -> None:
        self._target = target
        self._max_step_tokens = max_step_tokens
        self._decode_times = defaultdict[int, Median](Median)  # bit length of their number → seconds without prompts
        self._token_times = TokenTimes()  # of all steps
        self.row_cost = RowCosts()
        self._shortest = 0.0  # seconds of the shortest kind of step: the lowest of _decode_times
        self._prompt_token = Median()  # seconds per prompt token
        self._last_decodes = 1  # number of decodes in the last step that had any
        self._next = _Step(0.0, 0, 0, 0, 0.0)
        self._in_flight: deque[_Step] = deque()
        self._last_computed = -inf  # when the last step was computed

    @property
    def estimates(self) -> m.PrefillBudget:
        """The estimates for a step with as many decodes as the last step with decodes. Other threads may read them."""
        target, decodes = self._target if self._target < inf else 0.0, self._last_decodes
        decode_s = self.decode_time(decodes)
        return m.PrefillBudget(target, self.prefill_budget(decodes), decode_s, self._prompt_token.value)

    @property
    def in_flight(self) -> int:
        """How many steps are in flight."""
        return len(self._in_flight)

    def prefill_budget(self, decodes: int, least: int = MIN_PREFILL_TOKENS) -> int:
        """Returns how many prompt tokens a step with `decodes` decodes may have. least: how many it may always have"""
        prompt_token = self._prompt_token.value
        left = max(self._target - self.decode_time(decodes), MIN_PREFILL_RATIO * self._shortest)
        if not decodes or prompt_token * self._max_step_tokens <= left:
            return self._max_step_tokens
        return min(self._max_step_tokens, max(least, int(left / prompt_token) // TILE * TILE))

    def decode_time(self, decodes: int) -> float:
        """Estimates the seconds of a step with `decodes` decodes and no prompts.

        Uses measurements of steps with about as many decodes, or else with fewer decodes. Returns 0 if there are no
        such measurements.
        """
        for bits in range(decodes.bit_length(), 0, -1):
            if bits in self._decode_times:
                return self._decode_times[bits].value
        return 0.0

    def knows(self, decodes: int) -> bool:
        """Whether steps with about as many decodes have been measured."""
        return decodes.bit_length() in self._decode_times

    def tokens_within(self, seconds: float) -> int:
        """Returns how many tokens a step can compute in this time, at least one, be they decodes or of prompts."""
        return min(self._max_step_tokens, self._token_times.within(seconds))

    # Events of a step

    def planned(self, now: float, chunks: int, decodes: int, prompt_tokens: int) -> None:
        """Notes the step that was just planned. decodes: the rows of decodes and of drafts, which take equally long."""
        self._next = _Step(now, chunks, decodes, prompt_tokens, self.row_cost.take_proposing())
        self._last_decodes = decodes or self._last_decodes

    def launched(self, chunks: int) -> None:
        """Notes that the step that was planned last, or a part of it, is in flight."""
        whole = chunks == self._next.chunks
        self._in_flight.append(self._next if whole else _Step(self._next.planned, chunks, 0, 0, 0.0))

    def computed(self, now: float, drafts_host_s: float = 0.0) -> float | None:
        """Measures the oldest step in flight, which has just been computed. Returns its seconds if it had no prompts.

        drafts_host_s: seconds that the host took for the rows after its drafts: masks, samplers, log-probabilities

        The device is assumed to have started this step when it was planned or when the step before it was computed,
        whichever was later.
        """
        step = self._in_flight.popleft()
        seconds = now - max(step.planned, self._last_computed)
        self._learn(step, seconds, drafts_host_s)
        self._last_computed = now
        return None if step.prompt_tokens else seconds

    def discarded(self) -> None:
        self._in_flight.clear()

    def _learn(self, step: _Step, seconds: float, drafts_host_s: float) -> None:
        self._token_times.add(step.decodes + step.prompt_tokens, seconds)
        decode_s = self.decode_time(step.decodes)
        if step.decodes and (not step.prompt_tokens or seconds < decode_s):  # a step shorter than decode_s corrects it
            self._decode_times[step.decodes.bit_length()].add(seconds)
            if step.decodes <= TILE and not step.prompt_tokens:
                self.row_cost.add(step.chunks, step.decodes, seconds - step.proposing - drafts_host_s)
            self._shortest = min([known.value for known in self._decode_times.values()])
        elif step.prompt_tokens >= MIN_PREFILL_TOKENS:  # with fewer tokens, a step's fixed time distorts the result
            self._prompt_token.add((seconds - decode_s) / step.prompt_tokens)


# Measures how much longer a step of few rows takes with one more row. This cost decides whether drafts pay.
#
# A step with drafts is compared with recent steps without drafts that had the same number of sequences, because
# context length and sampling affect both alike. One comparison says little, because a row costs a few hundredths of a
# step, and steps of the same kind differ by as much. The result is therefore a weighted median of many comparisons.
# The weight of a comparison is its number of drafted rows. The assumed cost takes part in the median, too, with a
# weight of its own.
#
# If a draft model proposes the drafts, its time is measured separately and is no part of the cost of a row. Neither is
# the time that the host takes for a row (host_budget.py): it differs from sequence to sequence, so drafts.py adds that
# of the sequence itself.

ROW_COST = 1 / 40  # the assumed cost of one more row, as a share of a step, before it is measured
LEAST_ROW_COST = 1 / 200  # the lowest cost that is believed: a lower value is a measurement error
ASSUMED_ROWS = 3  # ROW_COST counts in the median like a comparison with this many drafted rows
COMPARISONS = 24  # the number of comparisons that are kept for each number of sequences
PROPOSAL_COST = 1 / 24  # the assumed time of a draft model for one draft, as a share of a step, before it is measured
PLAIN_EVERY = 32  # after this many steps with drafts, one step has none, so that there is something to compare with
# After this many steps without drafts, the oldest comparison and the draft model's time are dropped: they may be stale.
FORGET_AFTER = 64


class RowCosts:
    """The cost of one more row, for each number of sequences in a step."""

    def __init__(self) -> None:
        self._costs = defaultdict[int, _RowCost](_RowCost)
        self._proposing = 0.0  # seconds that the draft model has taken for the drafts of the next step

    def __call__(self, sequences: int) -> float:
        """Returns the cost of one more row in a step of `sequences` sequences, as a share of the step's time.

        If there is no measurement for this number of sequences, the cost for the nearest number is returned. The cost
        is infinite if a step without drafts should be measured first.
        """
        nearest = self._nearest(sequences)
        if not nearest or (nearest == sequences and self._costs[nearest].drafted_steps >= PLAIN_EVERY):
            return inf
        return self._costs[nearest].value

    def of_proposals(self, sequences: int) -> float:
        """Returns the draft model's time for one draft per sequence, as a share of a step without drafts."""
        nearest = self._nearest(sequences)
        return self._costs[nearest].proposal if nearest else PROPOSAL_COST

    def of_host(self, sequences: int, seconds: float) -> float:
        """Returns seconds as a share of a step without drafts; infinite if no such step has been measured."""
        nearest = self._nearest(sequences)
        plain = self._costs[nearest].plain if nearest else 0.0
        return seconds / plain if plain > 0 else inf

    def proposed(self, sequences: int, drafts: int, seconds: float, *, first: bool = False) -> None:
        """Notes the seconds that the draft model took to propose at most `drafts` drafts for each sequence.

        first: whether a sequence got its first proposal. The model then also reads the prompt, so these seconds say
        nothing about later drafts.
        """
        self._proposing += seconds
        if not first:
            self._costs[sequences].proposals.add(seconds / drafts)

    def take_proposing(self) -> float:
        """Returns the seconds that the draft model has taken since the last call of this function."""
        seconds, self._proposing = self._proposing, 0.0
        return seconds

    def add(self, sequences: int, rows: int, seconds: float) -> None:
        """Notes the seconds that a step with `sequences` sequences, `rows` rows and no prompts took.

        seconds: without the time of a draft model, and without the host's time for the rows after drafts.
        """
        self._costs[sequences].add(rows - sequences, seconds)

    def _nearest(self, sequences: int) -> int:
        return min(self._costs, key=lambda known: abs(known - sequences), default=0)


class _RowCost:
    def __init__(self) -> None:
        self.value = ROW_COST
        self.proposals = Median()  # seconds that the draft model takes for one draft per sequence
        self._plain = Median()  # seconds of a step without drafts
        self._plain_steps = 0
        self.drafted_steps = 0  # the number of steps with drafts since the last step without drafts
        self._compared: deque[tuple[float, int]] = deque(maxlen=COMPARISONS)  # (cost of a row, number of drafted rows)

    @property
    def plain(self) -> float:
        """Seconds of a step without drafts; 0 before the first one."""
        return self._plain.value

    @property
    def proposal(self) -> float:
        known = self.proposals.value > 0 and self._plain.value > 0
        return self.proposals.value / self._plain.value if known else PROPOSAL_COST

    def add(self, drafted: int, seconds: float) -> None:
        self.drafted_steps = self.drafted_steps + 1 if drafted else 0
        if drafted and self._plain.value > 0:
            self._compared.append(((seconds / self._plain.value - 1) / drafted, drafted))
            self.value = self._median()
        elif not drafted:
            self._plain.add(seconds)
            self._plain_steps += 1
            if self._plain_steps % FORGET_AFTER == 0:
                self.proposals = Median()
                if self._compared:
                    self._compared.popleft()
                    self.value = self._median()

    def _median(self) -> float:
        costs = sorted([*self._compared, (ROW_COST, ASSUMED_ROWS)])
        left = sum([rows for _, rows in costs]) / 2
        for cost, rows in costs:
            left -= rows
            if left <= 0:
                return max(LEAST_ROW_COST, cost)
        return ROW_COST


# Computes the median of the last few measurements.

SAMPLES = 7  # number of measurements that a median is computed from


class Median:
    """The lower median of the last few values; not the upper one, because disturbances only make steps longer."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=SAMPLES)
        self.value = 0.0

    def add(self, value: float) -> None:
        self._values.append(value)
        self.value = sorted(self._values)[(len(self._values) - 1) // 2]


# Says how many tokens a step can compute in a given time.


class TokenTimes:
    """The latest times of steps with about as many tokens, for each bit length of the number of tokens."""

    def __init__(self) -> None:
        # bit length → numbers of tokens, seconds
        self._steps = defaultdict[int, tuple[Median, Median]](lambda: (Median(), Median()))
        self._added = 0

    def add(self, tokens: int, seconds: float) -> None:
        """Notes a step. Sometimes, what is known of steps with more tokens is forgotten: it may keep steps small."""
        self._added += bool(tokens)
        if tokens and self._added % FORGET_AFTER == 0:
            self._steps.pop(min([bits for bits in self._steps if bits > tokens.bit_length()], default=0), None)
        if tokens:
            numbers, times = self._steps[tokens.bit_length()]
            numbers.add(tokens)
            times.add(seconds)

    def within(self, seconds: float) -> int:
        """Interpolates between the measurements. At most twice as many tokens are believed as have been measured."""
        before, tokens, each = (0.0, 0.0), 0.0, 0.0
        for bits in sorted(self._steps):
            tokens = self._steps[bits][0].value
            # no step is longer than those with more tokens: a measurement that says so is old, or was disturbed
            took = min(times.value for other, (_, times) in self._steps.items() if other >= bits)
            if took > seconds:
                part = (seconds - before[1]) / (took - before[1])
                return max(1, int(before[0] + part * (tokens - before[0])))
            each = (took - before[1]) / (tokens - before[0]) if tokens > before[0] else each
            before = (tokens, took)
        more = (seconds - before[1]) / each if each > 0 else tokens
        return max(1, int(tokens + min(more, tokens)))
