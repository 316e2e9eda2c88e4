"""Gives K/V pages of the page pool to sequences and takes them back.

It handles one sequence at a time. scheduler.py decides which sequence gets pages first, and which one is preempted.
"""

from array import array
from collections import Counter
from collections.abc import Collection
from math import ceil

from worker.kv_cache.pages import PagePool
from worker.kv_cache.prefix_cache import PrefixCache
from worker.schedule.sequence import Sequence


class Paging:
    """Gives pages to sequences. watermark: the share of the pool that claim() leaves for running sequences to grow."""

    def __init__(self, pool: PagePool, prefix_cache: bool, watermark: float) -> None:
        self.pool = pool
        self.prefix = PrefixCache(pool) if prefix_cache else None
        self._watermark_pages = ceil(watermark * pool.usable)
        self._last_refused: tuple[Sequence | None, int] = (None, 0)  # and how many pages were available then

    def fits(self, tokens: int) -> bool:
        """Whether the pool, if it were empty, could hold a sequence of that many tokens."""
        return self.pool.pages_for(tokens) <= self.pool.usable

    def claim(self, sequence: Sequence, *, alone: bool) -> bool:
        """Gives a sequence pages for all its tokens.

        Pages of a cached prefix are shared, and their tokens count as computed.

        Returns False and changes nothing if fewer pages than the watermark would be left. alone: no other sequence
        runs, so the watermark is ignored.
        """
        available = self.pool.available
        if self._last_refused[0] is sequence and available <= self._last_refused[1]:
            return False  # no page was freed since: saves looking up a long prompt at every step
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
        """Adds one page to a sequence. Returns False if no page is available."""
        page = self.pool.acquire(1)
        if page is None:
            return False
        sequence.pages.extend(page)
        return True

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Publishes the pages that became full when the K/V of positions start .. end-1 was written."""
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
        # To get the log-probabilities of prompt tokens, the prompt has to be computed.
        if self.prefix is None or (sequence.sampling.prompt_logprobs and not sequence.output_len):
            return []
        return self.prefix.match(sequence.digests, sequence.tokens, sequence.cache_salt)
