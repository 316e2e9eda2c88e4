"""Allows and forbids tokens by their ids, for `allowed_token_ids`, `bad_words` and the end of a reasoning budget.

The rules work with or without a grammar. They depend only on the output so far, so an answer is the same when it is
preempted, or resumed by another worker.
"""

from collections import deque
from collections.abc import Iterator
from copy import copy
from itertools import islice

import numpy as np

from shared.messages import Sampling
from worker.grammar.matcher import Bits, Matcher, Restriction
from worker.grammar.thinking import Thinking

NO_TOKEN = "allowed_token_ids, bad_words and the grammar together allow no further token"

Ids = tuple[int, ...]


def restriction(sampling: Sampling, grammar: Matcher | None = None) -> Restriction | None:
    """Returns the constraint of a new output; None if every token is allowed."""
    return TokenRules(sampling, grammar) if sampling.has_token_rules else grammar


class TokenRules(Restriction):
    """The rules of one output and their state, and the state of its grammar if it has one.

    The end of reasoning is forced as soon as the grammar and the allowed ids allow it, even if bad words forbid it.
    """

    __slots__ = ("_allowed", "_allowed_bits", "_bad_words", "_error", "_forbidden", "_grammar", "_tail", "_thinking")

    def __init__(self, sampling: Sampling, grammar: Matcher | None = None) -> None:
        budget = sampling.thinking
        self.state = None if grammar is None else grammar.state
        self._grammar = grammar
        self._allowed = frozenset(sampling.allowed_token_ids)
        self._allowed_bits: Bits | None = None  # computed when it is first needed
        self._bad_words = sampling.bad_words
        self._thinking = None if budget is None else Thinking(budget)
        self._forbidden = () if budget is None else budget.forbidden
        longest = [self._bad_words, self._forbidden, () if budget is None else (budget.opening,)]
        self._tail: deque[int] = deque(maxlen=max(len(ids) for each in longest for ids in (*each, (0,))))
        self._error = ""

    def copy(self) -> "TokenRules":
        other = copy(self)
        other._grammar = None if self._grammar is None else self._grammar.copy()
        other.state = None if other._grammar is None else other._grammar.state
        other._tail, other._thinking = copy(self._tail), copy(self._thinking)
        return other

    @property
    def masks(self) -> bool:
        return bool(self._grammar is not None or self._allowed or self._due or self._bans)

    @property
    def idle(self) -> bool:
        if self._grammar is not None or self._allowed or self._bad_words or self._forbidden:
            return False
        return self._thinking is None or self._thinking.over

    @property
    def ended(self) -> bool:
        return self._grammar is not None and self._grammar.ended

    @property
    def error(self) -> str:
        return self._error or (self._grammar.error if self._grammar is not None else "")

    @property
    def _due(self) -> Ids:
        return self._thinking.due if self._thinking is not None else ()

    @property
    def _bans(self) -> tuple[Ids, ...]:
        """The sequences of ids that the output must not contain from now on."""
        used_up = self._thinking is not None and self._thinking.used_up
        return self._bad_words + self._forbidden if used_up else self._bad_words

    def narrow(self, bits: Bits) -> None:
        if self._allowed:
            bits &= self._bits_of_allowed(len(bits))
        for id in self._due[:1]:
            if bits[id >> 3] >> (id & 7) & 1:
                bits[:] = 0
                bits[id >> 3] = 1 << (id & 7)
                return
        for id in self._banned():
            bits[id >> 3] &= ~np.uint8(1 << (id & 7))

    def _bits_of_allowed(self, size: int) -> Bits:
        if self._allowed_bits is None:
            self._allowed_bits = np.zeros(size, np.uint8)
            ids = np.fromiter(self._allowed, np.int64)
            np.bitwise_or.at(self._allowed_bits, ids >> 3, (1 << (ids & 7)).astype(np.uint8))
        return self._allowed_bits

    def _banned(self) -> Iterator[int]:
        """Yields the ids that would complete a banned sequence, whose other ids are the end of the output."""
        for ids in self._bans:
            before = len(self._tail) - len(ids) + 1
            if before >= 0 and tuple(islice(self._tail, before, None)) == ids[:-1]:
                yield ids[-1]

    def accept(self, token: int) -> bool:
        forced = token in self._due[:1]
        if (self._allowed and token not in self._allowed) or (not forced and token in self._banned()):
            self._error = NO_TOKEN
            return False
        if self._grammar is not None and not self._grammar.accept(token):
            return False
        self._tail.append(token)
        if self._thinking is not None:
            self._thinking.accept(list(self._tail))
        return True
