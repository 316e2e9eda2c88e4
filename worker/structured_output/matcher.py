"""Tracks the state of one output in its grammar. Works on token ids, and knows neither sequences nor logits."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shared.messages import Sampling, ThinkingBudget
from worker.scheduler.sequence import Constraint, Ids

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from worker.structured_output.masks_ahead import Mask, MasksAhead


MAX_ERROR_CHARS = 300
Bits = NDArray[np.uint8]  # one row: one bit per token, the lowest bit of a byte first; 1: the token is allowed


class Restriction(Constraint):
    """A constraint that is enforced by masking logits. Only accept() changes its state, so that a failed step can be
    retried."""

    __slots__ = ("state",)

    state: "LLMatcher | None"  # the state in the grammar; None without a grammar

    def narrow(self, bits: Bits) -> None:
        """Clears the bits of tokens that other rules than the grammar forbid."""

    def prepare(self, tenant: str) -> bool:
        return True

    @property
    def is_computed(self) -> bool:
        return False

    def prepared(self) -> tuple[Bits, float] | None:
        """Returns the mask of the grammar, and its seconds, if `prepare` has begun it or it was known before."""
        return None

    def copy(self) -> "Restriction":
        """Returns an independent copy of this constraint, in the same state."""
        raise NotImplementedError

    def after(self, ids: Ids) -> "tuple[Restriction, int]":
        state = self.copy()
        for at, id in enumerate(ids):
            if state.ended or not state.accept(id):  # a state that has refused an id is of no use any more
                return self.after(ids[:at])
        return state, len(ids)

    def replay(self, tokens: Iterable[int]) -> bool:
        """Accepts output that was generated before. Returns False if the output is not allowed."""
        return all(self.accept(token) for token in tokens)


class Matcher(Restriction):
    """The state of one output in its grammar."""

    __slots__ = ("_ahead", "_mask")

    state: "LLMatcher"

    def __init__(self, state: "LLMatcher", ahead: "MasksAhead | None" = None, mask: "Mask | None" = None) -> None:
        """ahead: computes masks that take long. mask: that of this state, if it is known"""
        self.state = state
        self._ahead, self._mask = ahead, mask

    def copy(self) -> "Matcher":
        self.prepared()  # the state may be copied only while no thread computes its mask
        return Matcher(self.state.deep_copy(), self._ahead, self._mask)

    def prepare(self, tenant: str) -> bool:
        if self._mask is None and self._ahead is not None:
            self._mask = self._ahead.begin(self.state, self, tenant)
        return self._mask is None or self._mask.done()

    def prepared(self) -> tuple[Bits, float] | None:
        if self._mask is not None and self._mask.cancel():
            self._mask = None
        return None if self._mask is None else self._mask.result()

    @property
    def _is_lent(self) -> bool:
        """Whether a thread computes the mask or will, so that nobody else may use the state. It begins only if a token
        may follow."""
        return self._mask is not None and not self._mask.done()

    @property
    def is_computed(self) -> bool:
        return self._mask is not None and self._mask.running()

    @property
    def masks(self) -> bool:
        return True

    @property
    def idle(self) -> bool:
        return False

    def accept(self, token: int) -> bool:
        self.prepared()
        self._mask = None
        return self.state.consume_token(token) and not self.state.is_error()  # eos is consumed even after an error

    @property
    def ended(self) -> bool:
        return not self._is_lent and self.state.is_stopped() and not self.state.is_error()

    @property
    def error(self) -> str:
        return "" if self._is_lent else error_text(self.state)

    def forced(self, limit: int) -> Ids:
        return tuple(self.state.compute_ff_tokens()[:limit])


def error_text(state: "LLMatcher") -> str:
    """Returns in one line why the grammar allows no further token, or "" if it allows one."""
    words = state.get_error().partition("<state>")[0].removesuffix("<non-verbose/>").strip()
    if not words:
        return ""
    return "the grammar allows no further token" if words.startswith("NoExtension") else words[:MAX_ERROR_CHARS]


# Allows and forbids tokens by their ids, for `allowed_token_ids`, `bad_words` and the end of a reasoning budget.
#
# The rules work with or without a grammar. They depend only on the output so far, so an answer is the same when it is
# preempted, or resumed by another worker.

NO_TOKEN = "allowed_token_ids, bad_words and the grammar together allow no further token"


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

    def prepare(self, tenant: str) -> bool:
        return self._grammar is None or self._grammar.prepare(tenant)

    @property
    def is_computed(self) -> bool:
        return self._grammar is not None and self._grammar.is_computed

    def prepared(self) -> tuple[Bits, float] | None:
        return None if self._grammar is None else self._grammar.prepared()

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

    def forced(self, limit: int) -> Ids:
        return self._due[:limit] or (() if self._grammar is None else self._grammar.forced(limit))

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


# Counts the reasoning tokens of one output, and ends its reasoning when the budget for reasoning is used up.


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
