"""The state of one sequence's output in its grammar. Knows token ids; knows no sequences and no logits."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from worker.schedule.sequence import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_ERROR_CHARS = 300


class Matcher(Constraint):
    """Changes in accept() only, once for each token that is kept, so that a step can be tried again."""

    __slots__ = ("state",)

    def __init__(self, state: "LLMatcher") -> None:
        self.state = state

    def accept(self, token: int) -> bool:
        return self.state.consume_token(token) and not self.state.is_error()  # an eos is consumed even after an error

    @property
    def ended(self) -> bool:
        return self.state.is_stopped() and not self.state.is_error()

    @property
    def error(self) -> str:
        return error_text(self.state)

    def replay(self, tokens: Iterable[int]) -> bool:
        """Accepts output that was generated before a crash; False if it does not fit."""
        return all(self.accept(token) for token in tokens)


def error_text(state: "LLMatcher") -> str:
    """Why no token can follow, in a line; empty if one can."""
    words = state.get_error().partition("<state>")[0].strip()
    if not words:
        return ""
    return "the grammar allows no further token" if words.startswith("NoExtension") else words[:MAX_ERROR_CHARS]
