"""Tracks the state of one output in its grammar. Works on token ids, and knows neither sequences nor logits."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from worker.schedule.records.constraint import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_ERROR_CHARS = 300

Bits = NDArray[np.uint8]  # of one row: bit i, from the lowest bit on, is for token i


class Restriction(Constraint):
    """A constraint that the device keeps to by masking logits. Only accept() changes it, so that a failed step can be
    retried."""

    __slots__ = ("state",)

    state: "LLMatcher | None"  # of its grammar

    def narrow(self, bits: Bits) -> None:
        """Clears the bits of the tokens that it forbids besides its grammar."""

    def copy(self) -> "Restriction":
        """Returns a constraint in the same state, which changes independently of this one."""
        raise NotImplementedError

    def ahead(self, answer: Iterable[int]) -> "Iterator[Restriction]":
        """Yields its state before each id of an answer, as one object that changes, up to an id that does not fit."""
        state = self.copy()
        for id in answer:
            yield state
            if not state.accept(id):
                return

    def replay(self, tokens: Iterable[int]) -> bool:
        """Accepts output that was generated before a crash. Returns False if the output does not fit."""
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
    """Returns in one line why no token can follow, or "" if a token can follow."""
    words = state.get_error().partition("<state>")[0].removesuffix("<non-verbose/>").strip()
    if not words:
        return ""
    return "the grammar allows no further token" if words.startswith("NoExtension") else words[:MAX_ERROR_CHARS]
