"""Gives K/V pages to sequences and takes them back: connects a sequence's counts with the page pool.

Knows one sequence at a time; scheduler.py decides which sequence gets pages first, and at whose expense.
"""

from array import array
from collections import Counter
from collections.abc import Collection
from math import ceil

from worker.kv_cache.pages import PagePool
from worker.kv_cache.prefix_cache import PrefixCache
from worker.schedule.sequence import Sequence


class Paging:
    """watermark: the share of the pool that claims leave to the growth of sequences that run already."""

    def __init__(self, pool: PagePool, prefix_cache: bool, watermark: float) -> None:
        self.pool = pool
        self.prefix = PrefixCache(pool) if prefix_cache else None
        self._watermark_pages = ceil(watermark * pool.usable)
        self._last_refused: tuple[Sequence | None, int] = (None, 0)  # with the number of pages available then

    def fits(self, tokens: int) -> bool:
        """Whether the empty pool could hold so many tokens of one sequence."""
        return self.pool.pages_for(tokens) <= self.pool.usable

    def claim(self, sequence: Sequence, *, alone: bool) -> bool:
        """Pages for all of a sequence's tokens; those of a cached prefix are shared and counted as computed.

        False, and nothing changes, if they do not fit above the watermark. alone: no other sequence runs; ignores the
        watermark.
        """
        available = self.pool.available
        if self._last_refused[0] is sequence and available <= self._last_refused[1]:
            return False  # nothing was freed since; a long prompt is not looked up at every step
        shared = self._match(sequence)
        fresh = self.pool.pages_for(len(sequence.tokens)) - len(shared)
        revived = sum(not self.pool.owned(page) for page in shared)
        if fresh + revived > available - (0 if alone else self._watermark_pages):
            self._last_refused = (sequence, available)
            return False
        self._last_refused = (None, 0)
        for page in shared:
            self.pool.share(page)
        sequence.pages = array("i", shared + (self.pool.acquire(fresh) or []))
        sequence.computed_tokens = len(shared) * self.pool.page_size
        if self.prefix is not None:
            self.prefix.count(len(sequence.tokens), sequence.computed_tokens)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Adds one page; False if there is none."""
        page = self.pool.acquire(1)
        if page is None:
            return False
        sequence.pages.extend(page)
        return True

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Publishes the pages that writing the K/V of positions start .. end-1 has filled."""
        if self.prefix is None:
            return
        size = self.pool.page_size
        self.prefix.extend(sequence.digests, sequence.tokens, sequence.cache_salt, end // size)
        self.prefix.publish(sequence.digests, sequence.pages, range(start // size, end // size))

    def free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = array("i")  # a new array: a step in flight may still read the old one

    def check(self, running: Collection[Sequence]) -> None:
        """Raises AssertionError unless the owned pages are exactly those of the running sequences."""
        self.pool.check()
        owners = Counter(page for sequence in running for page in sequence.pages)
        assert owners == self.pool.owners(), "the pool's owners are not the running sequences"
        for sequence in running:
            computed, slots = sequence.computed_tokens, len(sequence.pages) * self.pool.page_size
            assert computed <= slots, f"{sequence.key}: {computed} tokens computed, in {slots} slots"

    def _match(self, sequence: Sequence) -> list[int]:
        # Log-probabilities of a prompt's tokens come from computing them.
        if self.prefix is None or (sequence.sampling.prompt_logprobs and not sequence.output_len):
            return []
        return self.prefix.match(sequence.digests, sequence.tokens, sequence.cache_salt)
