"""Holds prompts that were computed for another worker until the K/V store has their pages.

A prefill worker's request has computed its prompt, and owns no pages any more, when copies of its last pages still wait
to be written. It ends, and the other worker begins, when they are written; or after MOST_S, as a disk may hang.
"""

from collections.abc import Callable

from worker.kv_cache.store import KvStore
from worker.scheduler.sequence import Key, Sequence

MOST_S = 5.0  # a request waits no longer: what is missing is computed again by the other worker


class HandOver:
    """`now` is the time of the loop's clock in seconds."""

    def __init__(self, store: KvStore) -> None:
        self._store = store
        self._waiting: dict[Key, tuple[Sequence, Callable[[], bool], float]] = {}  # until the time of the loop's clock

    def begin(self, sequence: Sequence, now: float) -> None:
        """Takes a sequence that has left the scheduler, and all of whose pages were given to the store."""
        self._waiting[sequence.key] = sequence, self._store.flush(), now + MOST_S

    def take(self, now: float) -> list[Sequence]:
        """Returns the sequences that need not wait any longer, and forgets them."""
        if not self._waiting:
            return []
        done = [key for key, (_, written, until) in self._waiting.items() if now >= until or written()]
        return [self._waiting.pop(key)[0] for key in done]

    def remove(self, key: Key) -> Sequence | None:
        """Forgets a sequence and returns it; None if it does not wait."""
        found = self._waiting.pop(key, None)
        return None if found is None else found[0]

    def clear(self) -> list[Sequence]:
        """Forgets all sequences and returns them."""
        found, self._waiting = [sequence for sequence, _, _ in self._waiting.values()], {}
        return found
