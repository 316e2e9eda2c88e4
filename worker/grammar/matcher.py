"""Tracks the state of one output in its grammar. Works on token ids, and knows neither sequences nor logits."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from worker.schedule.sequence import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_ERROR_CHARS = 300


class Matcher(Constraint):
    """The state of one output in its grammar. Only accept() changes it, so that a failed step can be retried."""

    __slots__ = ("state",)

    def __init__(self, state: "LLMatcher") -> None:
        self.state = state

    def accept(self, token: int) -> bool:
        return self.state.consume_token(token) and not self.state.is_error()  # eos is consumed even after an error

    @property
    def ended(self) -> bool:
        return self.state.is_stopped() and not self.state.is_error()

    @property
    def error(self) -> str:
        return error_text(self.state)

    def replay(self, tokens: Iterable[int]) -> bool:
        """Accepts output that was generated before a crash. Returns False if the output does not fit the grammar."""
        return all(self.accept(token) for token in tokens)


def error_text(state: "LLMatcher") -> str:
    """Returns in one line why no token can follow, or "" if a token can follow."""
    words = state.get_error().partition("<state>")[0].strip()
    if not words:
        return ""
    return "the grammar allows no further token" if words.startswith("NoExtension") else words[:MAX_ERROR_CHARS]
