"""Holds sequences from their Submit until their grammars are compiled and their adapters are read."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from shared.messages import Adapter
from worker.scheduler.queue import QueueFull, Refused
from worker.scheduler.sequence import Key, Sequence

if TYPE_CHECKING:  # features, which are imported at run time only when needed
    from worker.lora.loaded import LoadedAdapter
    from worker.lora.store import AdapterStore
    from worker.structured_output.compiler import Grammar, GrammarCompiler
    from worker.structured_output.matcher import Matcher

MAX_PREPARING = 256  # how many requests may wait for their grammars and adapters


@dataclass(slots=True)
class Preparing:
    """A sequence, and the grammar and adapter that are being prepared for it. waits: for room for its adapter"""

    sequence: Sequence
    grammar: "Future[Grammar] | None"
    adapter: "Future[LoadedAdapter] | None" = None
    waits: bool = False

    @property
    def done(self) -> bool:
        return not self.waits and all(future is None or future.done() for future in (self.grammar, self.adapter))

    def finish(self) -> str:
        """Gives the sequence its adapter and its constraint. Returns an error text, or ""."""
        use = self.sequence.adapter
        if use is not None and self.adapter is not None:
            try:
                use.loaded = self.adapter.result()
            except Exception as error:  # bad files, or no memory for them: only this request fails
                return str(error)
        needs_rules = self.grammar is not None or self.sequence.sampling.has_token_rules
        return _set_matcher(self.sequence, self.grammar) if needs_rules else ""


@dataclass(slots=True)
class PendingSequences:
    """Holds sequences with the futures of their grammars and adapters, in order of arrival."""

    _pending: dict[Key, Preparing] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, key: Key) -> bool:
        return key in self._pending

    def __iter__(self) -> Iterator[Key]:
        return iter(self._pending)

    def begin(
        self,
        sequence: Sequence,
        compiler: "GrammarCompiler | None",
        adapters: "AdapterStore | None",
        live: Callable[[], list[Sequence]],
    ) -> None:
        """Starts to compile the sequence's grammar and to read its adapter. Raises Refused.

        live: returns the queued and running sequences, whose adapters must stay in memory
        """
        text, use = sequence.sampling.grammar, sequence.adapter
        if len(self) >= MAX_PREPARING and not sequence.history.resumed:
            raise QueueFull(f"{MAX_PREPARING} requests are being prepared")
        grammar = None
        if use is not None and adapters is None:
            raise Refused("`model`: this worker was started without adapters")
        if text:
            if compiler is None:
                raise Refused("`response_format`: this worker cannot compile grammars")
            grammar = compiler.compile(text, sequence.turn.tenant)
        self._pending[sequence.key] = Preparing(sequence, grammar, waits=use is not None)
        if use is not None and adapters is not None:
            adapters.count(use.adapter.name)
            self.retry_waiting(adapters, live)

    def retry_waiting(self, adapters: "AdapterStore", live: Callable[[], list[Sequence]]) -> None:
        """Starts to read adapters of waiting sequences, in order of arrival, while there is room. live: see begin"""
        waiting = [one for one in self._pending.values() if one.waits]
        ahead: set[Adapter] = set()  # adapters for which there is no room

        def users() -> list[Sequence]:
            return [*live(), *(one.sequence for one in self._pending.values() if not one.waits)]

        for one in waiting:
            assert one.sequence.adapter is not None
            wanted = one.sequence.adapter.adapter
            if wanted.unscaled not in ahead:
                one.adapter = adapters.load(wanted, users, behind=len(ahead))
                one.waits = one.adapter is None
            if one.waits:
                ahead.add(wanted.unscaled)

    def sequences(self) -> list[Sequence]:
        return [one.sequence for one in self._pending.values()]

    def remove(self, key: Key) -> Sequence | None:
        """Removes and returns a sequence. Returns None if the sequence is not here."""
        found = self._pending.pop(key, None)
        return None if found is None else found.sequence

    def take_ready(self) -> list[tuple[Sequence, str]]:
        """Removes the sequences whose preparation has finished. Returns each of them with an error text, or ""."""
        ready = [self._pending.pop(key) for key in [key for key, one in self._pending.items() if one.done]]
        return [(one.sequence, one.finish()) for one in ready]

    def expire(self, now: float) -> list[Sequence]:
        """Removes and returns the sequences whose deadline has passed."""
        keys = [key for key, one in self._pending.items() if one.sequence.turn.deadline <= now]
        return [self._pending.pop(key).sequence for key in keys]


def _set_matcher(sequence: Sequence, grammar: "Future[Grammar] | None") -> str:
    """Gives a sequence its constraint, from a compiled grammar if it has one. Returns an error text, or ""."""
    if grammar is None:
        return constrain(sequence)
    from worker.structured_output.compiler import InvalidGrammar

    try:
        return constrain(sequence, grammar.result().new_matcher())
    except InvalidGrammar as invalid:
        return str(invalid)


def constrain(sequence: Sequence, grammar: "Matcher | None" = None) -> str:
    """Gives a sequence its constraint, and replays the output so far in it. Returns an error text, or ""."""
    from worker.structured_output.matcher import restriction

    constraint = restriction(sequence.sampling, grammar)
    if constraint is not None and not constraint.replay(sequence.tokens[sequence.prompt_len :]):
        return "the output generated so far does not fit the grammar, or contains tokens that are not allowed"
    sequence.constraint = None if constraint is None or constraint.idle else constraint
    if sequence.sampling.allowed_token_ids:  # the bits of the constraint take a fiftieth of the memory
        sequence.sampling = msgspec.structs.replace(sequence.sampling, allowed_token_ids=())
    return ""
