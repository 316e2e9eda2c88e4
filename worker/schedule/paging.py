"""Gives pages to sequences and takes them back: the seam between a sequence's counts and the pool.

Knows one sequence at a time; who gets pages first, and at whose expense, is the scheduler's business.
"""

from array import array
from collections import Counter
from collections.abc import Collection
from math import ceil

from worker.kv_cache.pages import PagePool
from worker.kv_cache.prefix_cache import PrefixCache
from worker.schedule.sequence import Sequence


class Paging:
    """`watermark` is the share of the pool that claims leave to the growth of sequences that run already."""

    def __init__(self, pool: PagePool, prefix_cache: bool, watermark: float) -> None:
        self.pool = pool
        self.prefix = PrefixCache(pool) if prefix_cache else None
        self._watermark = ceil(watermark * pool.usable)
        self._refused: tuple[Sequence | None, int] = (None, 0)  # the last claim that failed, pages available then

    def fits(self, tokens: int) -> bool:
        """Whether the empty pool could hold so many tokens of one sequence."""
        return self.pool.pages_for(tokens) <= self.pool.usable

    def claim(self, sequence: Sequence, *, alone: bool) -> bool:
        """Pages for all of a sequence's tokens, those of a cached prefix shared and counted as computed.

        False, and nothing changes, if they do not fit above the watermark, which is ignored when it runs `alone`.
        """
        available = self.pool.available
        if self._refused[0] is sequence and available <= self._refused[1]:
            return False  # nothing was freed since; a long prompt is not looked up at every step
        shared = self._match(sequence)
        fresh = self.pool.pages_for(len(sequence.tokens)) - len(shared)
        revived = sum(not self.pool.owned(page) for page in shared)
        if fresh + revived > available - (0 if alone else self._watermark):
            self._refused = (sequence, available)
            return False
        self._refused = (None, 0)
        for page in shared:
            self.pool.share(page)
        sequence.pages = array("i", shared + (self.pool.acquire(fresh) or []))
        sequence.computed_tokens = len(shared) * self.pool.page_size
        if self.prefix is not None:
            self.prefix.count(len(sequence.tokens), sequence.computed_tokens)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """One more page, if there is one."""
        page = self.pool.acquire(1)
        if page is None:
            return False
        sequence.pages.extend(page)
        return True

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """K/V of positions start .. end-1 was written: the pages that this filled can be found by others now."""
        if self.prefix is None:
            return
        size = self.pool.page_size
        self.prefix.extend(sequence.digests, sequence.tokens, sequence.cache_salt, end // size)
        self.prefix.publish(sequence.digests, sequence.pages, range(start // size, end // size))

    def free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = array("i")  # not cleared: a step under way may still read the list

    def check(self, running: Collection[Sequence]) -> None:
        """Raises AssertionError unless the owned pages are exactly those of the running sequences."""
        self.pool.check()
        owners = Counter(page for sequence in running for page in sequence.pages)
        assert owners == self.pool.owners(), "the pool's owners are not the running sequences"
        for sequence in running:
            room = len(sequence.pages) * self.pool.page_size
            assert sequence.computed_tokens <= room, (
                f"{sequence.key}: {sequence.computed_tokens} tokens computed, room for {room}"
            )

    def _match(self, sequence: Sequence) -> list[int]:
        # Log-probabilities of a prompt's tokens come from computing them.
        if self.prefix is None or (sequence.sampling.prompt_logprobs and not sequence.output_len):
            return []
        return self.prefix.match(sequence.digests, sequence.tokens, sequence.cache_salt)
