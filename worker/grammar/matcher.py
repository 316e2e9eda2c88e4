"""How far one sequence's output has come in its grammar. Knows token ids; knows no sequences and no logits."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from worker.schedule.sequence import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_REASON = 300


class Matcher(Constraint):
    """Changes in `advance` only, once for each committed token, so that a step can be tried again."""

    __slots__ = ("state",)

    def __init__(self, state: "LLMatcher") -> None:
        self.state = state

    def advance(self, token: int) -> bool:
        return self.state.consume_token(token) and not self.state.is_error()  # it takes an eos even after an error

    @property
    def ended(self) -> bool:
        return self.state.is_stopped() and not self.state.is_error()

    @property
    def error(self) -> str:
        return reason(self.state)

    def replay(self, tokens: Iterable[int]) -> bool:
        """Takes output that was generated before a crash; False where it does not fit."""
        return all(self.advance(token) for token in tokens)


def reason(state: "LLMatcher") -> str:
    """Why nothing can follow, in a line; empty when something can."""
    words = state.get_error().partition("<state>")[0].strip()
    if not words:
        return ""
    return "the grammar has no way on" if words.startswith("NoExtension") else words[:MAX_REASON]
