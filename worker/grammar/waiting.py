"""Sequences whose grammars are being compiled, from Submit until they can be scheduled. Knows no messages."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from worker.grammar.compiler import Grammar, Invalid
from worker.schedule.sequence import Key, Sequence


@dataclass(slots=True)
class Waiting:
    """In order of arrival. Whoever is taken out is forgotten here."""

    _held: dict[Key, tuple[Sequence, "Future[Grammar]"]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[Key]:
        return iter(self._held)

    def hold(self, sequence: Sequence, compiled: "Future[Grammar]") -> None:
        self._held[sequence.key] = sequence, compiled

    def drop(self, key: Key) -> Sequence | None:
        """Takes one out, if it waits."""
        held = self._held.pop(key, None)
        return held[0] if held else None

    def ready(self) -> list[tuple[Sequence, str]]:
        """Takes out those whose grammars are compiled, with matchers; or what is wrong with them, in a sentence."""
        keys = [key for key, (_, compiled) in self._held.items() if compiled.done()]
        return [(self._held[key][0], _bind(*self._held.pop(key))) for key in keys]

    def expire(self, now: float) -> list[Sequence]:
        """Takes out those whose deadlines have passed."""
        keys = [key for key, (sequence, _) in self._held.items() if sequence.deadline <= now]
        return [self._held.pop(key)[0] for key in keys]


def _bind(sequence: Sequence, compiled: "Future[Grammar]") -> str:
    """The matcher moves over the output that a resumed sequence brings."""
    try:
        matcher = compiled.result().matcher()
    except Invalid as invalid:
        return str(invalid)
    if not matcher.replay(sequence.tokens[sequence.prompt_len :]):
        return "what was generated so far does not keep to the grammar"
    sequence.constraint = matcher
    return ""
