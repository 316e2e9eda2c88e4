"""Tracks how many tokens one output has thought, and which ids end its reasoning when its budget is used up."""

from collections.abc import Sequence

from shared.messages import ThinkingBudget


class Thinking:
    """The state of one output in its budget for reasoning."""

    __slots__ = ("_budget", "_left", "_may_open", "_open", "due")

    def __init__(self, budget: ThinkingBudget) -> None:
        self.due: tuple[int, ...] = ()  # the ids that must follow now
        self._budget = budget
        self._left = budget.tokens
        self._open = budget.begun
        self._may_open = not budget.begun or budget.blanks is None
        self._end_when_used_up()

    @property
    def used_up(self) -> bool:
        """Whether the output has thought as much as it may."""
        return self._left <= 0

    @property
    def over(self) -> bool:
        """Whether the output cannot think any more."""
        return not (self._open or self._may_open or self.due)

    def accept(self, output: Sequence[int]) -> None:
        """Counts the last token of `output`, which has at least as many ids as `opening`, or is the whole output."""
        token, budget = output[-1], self._budget
        if self.due and token == self.due[0]:
            self._open, self.due = False, self.due[1:]
            return
        if self._open:
            self._open = token != budget.closing
            self._left -= self._open
        elif self._may_open:
            self._open = tuple(output[-len(budget.opening) :]) == budget.opening
            if budget.blanks is not None and (self._open or token not in budget.blanks):
                self._may_open = False
        self._end_when_used_up()

    def _end_when_used_up(self) -> None:
        self.due = self._budget.forced if self._open and self.used_up else ()
