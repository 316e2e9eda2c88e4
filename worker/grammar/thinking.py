"""Counts the reasoning tokens of one output, and ends its reasoning when the budget for reasoning is used up."""

from collections.abc import Sequence

from shared.messages import ThinkingBudget


class Thinking:
    """How much of its budget for reasoning one output has used, and whether the output is reasoning now."""

    __slots__ = ("_budget", "_left", "_matched", "_may_open", "_open", "due")

    def __init__(self, budget: ThinkingBudget) -> None:
        self.due: tuple[int, ...] = ()  # the ids that the output must continue with, to end the reasoning
        self._budget = budget
        self._left = budget.tokens
        self._open = budget.begun
        self._matched = 0  # how many ids of the opening the output begins with, after blanks
        self._may_open = not budget.begun or budget.blanks is None
        self._end_when_used_up()

    @property
    def used_up(self) -> bool:
        """Whether the budget for reasoning is used up."""
        return self._left <= 0

    @property
    def over(self) -> bool:
        """Whether no more reasoning can follow in this output."""
        return not (self._open or self._may_open or self.due)

    def accept(self, output: Sequence[int]) -> None:
        """Counts the last token of the output.

        output: the whole output, or at least its last len(opening) tokens
        """
        token, budget = output[-1], self._budget
        if self.due and token == self.due[0]:
            self._open, self.due = False, self.due[1:]
            return
        if self._open:
            self._open = token != budget.closing
            self._left -= self._open
        elif self._may_open:
            self._open = tuple(output[-len(budget.opening) :]) == budget.opening
            if budget.blanks is not None:
                self._may_open = not self._open and self._begins_to_open(token)
        self._end_when_used_up()

    def _begins_to_open(self, token: int) -> bool:
        """Whether the output so far, with this token, is blanks and then possibly the first ids of the opening."""
        budget = self._budget
        if token == budget.opening[self._matched]:
            self._matched += 1
            return True
        return not self._matched and token in (budget.blanks or ())

    def _end_when_used_up(self) -> None:
        self.due = self._budget.forced if self._open and self.used_up else ()
