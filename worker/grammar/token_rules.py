"""Allows and forbids tokens by their ids, for `allowed_token_ids`, `bad_words` and the end of a reasoning budget.

The rules work with or without a grammar. They depend only on the output so far, so an answer is the same when it is
preempted, or resumed by another worker.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from copy import copy

import numpy as np

from shared.messages import Sampling
from worker.grammar.matcher import Bits, Matcher, Restriction
from worker.grammar.thinking import Thinking

NO_TOKEN = "allowed_token_ids, bad_words and the grammar together allow no further token"

Ids = tuple[int, ...]


def restriction(sampling: Sampling, grammar: Matcher | None = None) -> Restriction | None:
    """Returns the constraint of a new output; None if every token is allowed."""
    return TokenRules(sampling, grammar) if sampling.has_token_rules else grammar


class Endings:
    """Sequences of ids that an output must not contain. A row costs one look-up for each length, not each sequence."""

    __slots__ = ("_lengths", "_next", "longest")

    def __init__(self, sequences: Iterable[Ids]) -> None:
        self._next: dict[Ids, list[int]] = {}  # the ids of a sequence without its last one → the last ids
        for ids in sequences:
            self._next.setdefault(ids[:-1], []).append(ids[-1])
        self._lengths = sorted({*map(len, self._next)})
        self.longest = 1 + max(self._lengths, default=0)  # the length of the longest sequence; 1 if there is none

    def __bool__(self) -> bool:
        return bool(self._next)

    def after(self, output: Iterable[int]) -> Iterator[int]:
        """Yields the ids that would complete a sequence whose other ids are the end of the output."""
        tail = tuple(output)
        for length in self._lengths:
            if length <= len(tail):
                yield from self._next.get(tail[len(tail) - length :], ())


def _bits_of(ids: Ids) -> Bits:
    """Returns the ids as bits, the lowest bit of a byte first, up to the byte of the highest id; empty without ids."""
    bits = np.zeros(max(ids, default=-8) // 8 + 1, np.uint8)
    places = np.array(ids, np.int64)
    np.bitwise_or.at(bits, places >> 3, (1 << (places & 7)).astype(np.uint8))
    return bits


class TokenRules(Restriction):
    """The rules of one output and their state, and the state of its grammar if it has one.

    The end of reasoning is forced as soon as the grammar and the allowed ids allow it, even if bad words forbid it.
    """

    __slots__ = ("_allowed", "_bad_words", "_error", "_forbidden", "_grammar", "_tail", "_thinking")

    def __init__(self, sampling: Sampling, grammar: Matcher | None = None) -> None:
        budget = sampling.thinking
        self.state = None if grammar is None else grammar.state
        self._grammar = grammar
        self._allowed = _bits_of(sampling.allowed_token_ids)  # empty: every token is allowed
        self._bad_words = Endings(sampling.bad_words)
        self._thinking = None if budget is None else Thinking(budget)
        self._forbidden = Endings(() if budget is None else budget.forbidden)
        opening = 1 if budget is None else len(budget.opening)
        longest = max(opening, self._bad_words.longest, self._forbidden.longest)
        self._tail: deque[int] = deque(maxlen=longest)
        self._error = ""

    def copy(self) -> "TokenRules":
        other = copy(self)
        other._grammar = None if self._grammar is None else self._grammar.copy()
        other.state = None if other._grammar is None else other._grammar.state
        other._tail, other._thinking = copy(self._tail), copy(self._thinking)
        return other

    @property
    def masks(self) -> bool:
        return bool(self._grammar is not None or len(self._allowed) or self._due or self._bans)

    @property
    def idle(self) -> bool:
        if self._grammar is not None or len(self._allowed) or self._bad_words or self._forbidden:
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
    def _bans(self) -> "list[Endings]":
        """The sequences of ids that the output must not contain from now on."""
        used_up = self._thinking is not None and self._thinking.used_up
        return [one for one in (self._bad_words, self._forbidden if used_up else None) if one]

    def narrow(self, bits: Bits) -> None:
        if len(self._allowed):
            bits[: len(self._allowed)] &= self._allowed[: len(bits)]
            bits[len(self._allowed) :] = 0
        for id in self._due[:1]:
            if bits[id >> 3] >> (id & 7) & 1:
                bits[:] = 0
                bits[id >> 3] = 1 << (id & 7)
                return
        for id in self._banned():
            bits[id >> 3] &= ~np.uint8(1 << (id & 7))

    def _may(self, token: int) -> bool:
        """Whether the allowed ids contain a token."""
        if not len(self._allowed):
            return True
        return token >> 3 < len(self._allowed) and bool(self._allowed[token >> 3] >> (token & 7) & 1)

    def _banned(self) -> Iterator[int]:
        """Yields the ids that would complete a banned sequence, whose other ids are the end of the output."""
        for endings in self._bans:
            yield from endings.after(self._tail)

    def accept(self, token: int) -> bool:
        forced = token in self._due[:1]
        if not self._may(token) or (not forced and token in self._banned()):
            self._error = NO_TOKEN
            return False
        if self._grammar is not None and not self._grammar.accept(token):
            return False
        self._tail.append(token)
        if self._thinking is not None:
            self._thinking.accept(list(self._tail))
        return True
