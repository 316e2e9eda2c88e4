"""Measures how much longer a step of few rows takes with one more row. This cost decides whether drafts pay.

A step with drafts is compared with recent steps without drafts that had the same number of sequences, because context
length and sampling affect both alike. One comparison says little, because a row costs a few hundredths of a step, and
steps of the same kind differ by as much. The result is therefore a weighted median of many comparisons. The weight of
a comparison is its number of drafted rows. The assumed cost takes part in the median, too, with a weight of its own.

If a draft model proposes the drafts, its time is measured separately and is no part of the cost of a row.
"""

from collections import deque
from math import inf

from worker.schedule.recent import Median

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
        self._costs: dict[int, _RowCost] = {}
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

    def proposed(self, sequences: int, drafts: int, seconds: float, *, first: bool = False) -> None:
        """Notes the seconds that the draft model took to propose at most `drafts` drafts for each sequence.

        first: whether a sequence got its first proposal. The model then also reads the prompt, so these seconds say
        nothing about later drafts.
        """
        self._proposing += seconds
        if not first:
            self._costs.setdefault(sequences, _RowCost()).proposals.add(seconds / drafts)

    def take_proposing(self) -> float:
        """Returns the seconds that the draft model has taken since the last call of this function."""
        seconds, self._proposing = self._proposing, 0.0
        return seconds

    def add(self, sequences: int, rows: int, seconds: float) -> None:
        """Notes the seconds that a step with `sequences` sequences, `rows` rows and no prompts took.

        seconds: without the time of a draft model.
        """
        self._costs.setdefault(sequences, _RowCost()).add(rows - sequences, seconds)

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
