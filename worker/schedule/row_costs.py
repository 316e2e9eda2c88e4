"""Measures what one more row costs in a step of few rows, which decides whether drafts pay.

A step with drafts is compared with recent steps of as many sequences without drafts, because the length of the contexts
and the kind of sampling change both alike. One comparison says little: a row costs a few hundredths of a step, and
steps of the same kind differ by as much. The result is therefore a weighted median of many comparisons. The weight of
a comparison is its number of drafted rows. The assumed cost takes part in the median, too, with a weight of its own.

If a model proposes drafts, the time that it takes is no part of the row's cost, but measured by itself.
"""

from collections import deque
from math import inf

from worker.schedule.recent import Median

ROW_COST = 1 / 40  # the assumed cost of one more row, as a share of a step, before it is measured
LEAST_ROW_COST = 1 / 200  # a lower one is an error of measurement
ASSUMED_ROWS = 8  # the assumption counts as a comparison with so many rows
COMPARISONS = 24  # so many are kept for each number of sequences
PROPOSAL_COST = 1 / 24  # the assumed time of a model for one draft, as a share of a step, before it is measured
PLAIN_EVERY = 32  # after so many steps with drafts, one has none, so that there is something to compare with
# After so many steps without drafts, one comparison is forgotten, and what a model takes: the machine may have changed.
FORGET_AFTER = 64


class RowCosts:
    """The costs of a row by the number of sequences in a step."""

    def __init__(self) -> None:
        self._costs: dict[int, _RowCost] = {}
        self._proposing = 0.0  # seconds that a model has taken for the next step

    def __call__(self, sequences: int) -> float:
        """Returns the cost of a row in a step of so many sequences, as a share of the step's time without it.

        If it is not measured for this number, it is that of the nearest number. It is infinite if a step without drafts
        should be measured first.
        """
        nearest = self._nearest(sequences)
        if not nearest or (nearest == sequences and self._costs[nearest].drafted_steps >= PLAIN_EVERY):
            return inf
        return self._costs[nearest].value

    def of_proposals(self, sequences: int) -> float:
        """Returns the time of a model for one more draft of each sequence, as a share of a step without drafts."""
        nearest = self._nearest(sequences)
        return self._costs[nearest].proposal if nearest else PROPOSAL_COST

    def proposed(self, sequences: int, drafts: int, seconds: float, *, first: bool = False) -> None:
        """Notes the seconds that a model has taken for at most so many drafts of each sequence of the next step.

        first: whether it has proposed for a sequence for the first time, and has read its prompt for that. These
        seconds say nothing of later drafts.
        """
        self._proposing += seconds
        if not first:
            self._costs.setdefault(sequences, _RowCost()).proposals.add(seconds / drafts)

    def take_proposing(self) -> float:
        """Returns the seconds that a model has taken since this was called last."""
        seconds, self._proposing = self._proposing, 0.0
        return seconds

    def add(self, sequences: int, rows: int, seconds: float) -> None:
        """Notes the seconds that a step without prompts took, by its numbers of sequences and of rows.

        seconds: without those of a model that proposes drafts.
        """
        self._costs.setdefault(sequences, _RowCost()).add(rows - sequences, seconds)

    def _nearest(self, sequences: int) -> int:
        return min(self._costs, key=lambda known: abs(known - sequences), default=0)


class _RowCost:
    def __init__(self) -> None:
        self.value = ROW_COST
        self.proposals = Median()  # seconds that a model takes for one draft of each sequence
        self._plain = Median()  # seconds of a step without drafts
        self._plain_steps = 0
        self.drafted_steps = 0  # since the last step without drafts
        self._compared: deque[tuple[float, int]] = deque(maxlen=COMPARISONS)  # the cost of a row, and how many rows

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
