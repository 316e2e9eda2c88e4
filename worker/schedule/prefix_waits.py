"""Lets a prompt wait while another prompt with the same prefix is being computed.

When many requests with one long system prompt arrive together, each of them would compute this prefix, because the
prefix cache has it only after the first prompt's steps. So a prompt that has computed nothing yet is left out of a
step as long as another prompt in this step, or in a step in flight, has pages of the same prefix to compute. Then it
takes these pages from the prefix cache.
"""

from collections.abc import Collection

from worker.schedule.paging import Paging
from worker.schedule.sequence import Sequence


class PrefixWaits:
    """Tracks the pages that prompts in this step and in the steps in flight have yet to compute."""

    def __init__(self, paging: Paging, running: Collection[Sequence]) -> None:
        """running: a live view of the running sequences"""
        self._paging = paging
        self._running = running
        self._size = paging.page_size
        self._expected: set[bytes] | None = None  # digests of pages to be computed; None: not collected yet

    def begin_plan(self) -> None:
        self._expected = None

    def waits(self, sequence: Sequence) -> bool:
        """Whether a prompt should be left out of this step. If False, the prompt has all cached pages of its prefix."""
        if self._expected is None:
            in_flight = [other for other in self._running if other.in_flight_tokens > 1]
            self._expected = {digest for other in in_flight for digest in self._missing(other)}
        begun = sequence.computed_tokens != sequence.prefix.claimed_tokens or sequence.in_flight_tokens
        if not begun and sequence.check is None:
            usable = min(sequence.cacheable_tokens, len(sequence.tokens) - 1) // self._size
            missing = self._missing(sequence, usable)
            if not self._expected.isdisjoint(missing):
                return True
            if missing and any(pool.find(missing[0]) is not None for pool in self._paging.pools):
                self._paging.claim_again(sequence)
        self._expected.update(self._missing(sequence))
        return False

    def _missing(self, sequence: Sequence, end: int | None = None) -> list[bytes]:
        """Returns the digests of a sequence's pages before page `end` that are not fully computed yet."""
        return sequence.prefix.digests[sequence.computed_tokens // self._size : end]
