"""Tracks the state of one output in its grammar. Works on token ids, and knows neither sequences nor logits."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from worker.schedule.records.constraint import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_ERROR_CHARS = 300

Bits = NDArray[np.uint8]  # one row: one bit per token, the lowest bit of a byte first; 1: the token is allowed


class Restriction(Constraint):
    """A constraint that is enforced by masking logits. Only accept() changes its state, so that a failed step can be
    retried."""

    __slots__ = ("state",)

    state: "LLMatcher | None"  # the state in the grammar; None without a grammar

    def narrow(self, bits: Bits) -> None:
        """Clears the bits of tokens that other rules than the grammar forbid."""

    def copy(self) -> "Restriction":
        """Returns an independent copy of this constraint, in the same state."""
        raise NotImplementedError

    def ahead(self, answer: Iterable[int]) -> "Iterator[Restriction]":
        """Yields the state before each id of an answer.

        Yields the same object each time, after it has accepted the ids before. Ends when an id is not allowed.
        """
        state = self.copy()
        for id in answer:
            yield state
            if not state.accept(id):
                return

    def replay(self, tokens: Iterable[int]) -> bool:
        """Accepts output that was generated before. Returns False if the output is not allowed."""
        return all(self.accept(token) for token in tokens)


class Matcher(Restriction):
    """The state of one output in its grammar."""

    __slots__ = ()

    state: "LLMatcher"

    def __init__(self, state: "LLMatcher") -> None:
        self.state = state

    def copy(self) -> "Matcher":
        return Matcher(self.state.deep_copy())

    @property
    def masks(self) -> bool:
        return True

    @property
    def idle(self) -> bool:
        return False

    def accept(self, token: int) -> bool:
        return self.state.consume_token(token) and not self.state.is_error()  # eos is consumed even after an error

    @property
    def ended(self) -> bool:
        return self.state.is_stopped() and not self.state.is_error()

    @property
    def error(self) -> str:
        return error_text(self.state)


def error_text(state: "LLMatcher") -> str:
    """Returns in one line why the grammar allows no further token, or "" if it allows one."""
    words = state.get_error().partition("<state>")[0].removesuffix("<non-verbose/>").strip()
    if not words:
        return ""
    return "the grammar allows no further token" if words.startswith("NoExtension") else words[:MAX_ERROR_CHARS]
