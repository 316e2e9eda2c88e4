"""Holds sequences from their Submit until their grammars are compiled. Creates no messages."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from worker.schedule.sequence import Key, Sequence

if TYPE_CHECKING:  # a worker that serves plain requests compiles no grammars
    from worker.grammar.compiler import Grammar
    from worker.grammar.matcher import Matcher


@dataclass(slots=True)
class PendingGrammars:
    """Holds sequences and the futures of their grammars, in order of arrival."""

    _pending: dict[Key, tuple[Sequence, "Future[Grammar]"]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, key: Key) -> bool:
        return key in self._pending

    def __iter__(self) -> Iterator[Key]:
        return iter(self._pending)

    def add(self, sequence: Sequence, grammar: "Future[Grammar]") -> None:
        self._pending[sequence.key] = sequence, grammar

    def remove(self, key: Key) -> Sequence | None:
        """Removes and returns a sequence. Returns None if the sequence is not here."""
        sequence, _ = self._pending.pop(key, (None, None))
        return sequence

    def take_ready(self) -> list[tuple[Sequence, str]]:
        """Removes sequences whose grammars are compiled and sets their matchers. Returns each with an error or ""."""
        keys = [key for key, (_, grammar) in self._pending.items() if grammar.done()]
        return [(self._pending[key][0], _set_matcher(*self._pending.pop(key))) for key in keys]

    def expire(self, now: float) -> list[Sequence]:
        """Removes and returns the sequences whose deadline has passed."""
        keys = [key for key, (sequence, _) in self._pending.items() if sequence.turn.deadline <= now]
        return [self._pending.pop(key)[0] for key in keys]


def _set_matcher(sequence: Sequence, grammar: "Future[Grammar]") -> str:
    """Gives a sequence a new matcher, which accepts any output so far. Returns why that fails, or ""."""
    from worker.grammar.compiler import InvalidGrammar

    try:
        return constrain(sequence, grammar.result().new_matcher())
    except InvalidGrammar as invalid:
        return str(invalid)


def constrain(sequence: Sequence, grammar: "Matcher | None" = None) -> str:
    """Gives a sequence its constraint, which accepts any output so far. Returns why that fails, or ""."""
    from worker.grammar.token_rules import restriction

    constraint = restriction(sequence.sampling, grammar)
    if constraint is not None and not constraint.replay(sequence.tokens[sequence.prompt_len :]):
        return "the output generated so far does not fit the grammar, or contains tokens that are not allowed"
    sequence.constraint = None if constraint is None or constraint.idle else constraint
    return ""
