"""Lets a prompt wait while another prompt with the same prefix is being computed.

When many requests with one long system prompt arrive together, each of them would compute this prefix, because the
prefix cache has it only after the first prompt's steps. So a prompt that has computed nothing yet is left out of a
step as long as another prompt in this step, or in a step in flight, has pages of the same prefix to compute. Then it
takes these pages from the prefix cache.
"""

from collections.abc import Iterable

from worker.schedule.paging import Paging
from worker.schedule.sequence import Sequence


class PrefixWaits:
    """Knows the pages that are still to be computed for the prompts of a step and of the steps in flight."""

    def __init__(self, paging: Paging) -> None:
        self._paging = paging
        self._size = paging.page_size
        self._expected: set[bytes] = set()  # digests of these pages

    def begin(self, running: Iterable[Sequence]) -> None:
        """Begins a plan: notes the pages of the prompts that steps in flight compute."""
        self._expected.clear()
        for sequence in running:
            if sequence.in_flight_tokens > 1:
                self._expected.update(sequence.prefix.digests[sequence.computed_tokens // self._size :])

    def waits(self, sequence: Sequence) -> bool:
        """Whether a prompt should be left out of this step. If not, it has all cached pages of its prefix by now."""
        begun = sequence.computed_tokens != sequence.prefix.claimed_tokens or sequence.in_flight_tokens
        if not begun and sequence.check is None:
            usable = min(sequence.cacheable_tokens, len(sequence.tokens) - 1) // self._size
            missing = sequence.prefix.digests[sequence.computed_tokens // self._size : usable]
            if not self._expected.isdisjoint(missing):
                return True
            if missing and any(pool.find(missing[0]) is not None for pool in self._paging.pools):
                self._paging.claim_again(sequence)
        self._expected.update(sequence.prefix.digests[sequence.computed_tokens // self._size :])
        return False
