"""Gives K/V pages to sequences and takes them back.

Each group of layers has a pool of pages, and a sequence needs pages of every pool. If layers have a recurrent state, a
sequence needs slots, too (recurrent_slots.py). This module handles one sequence at a time. scheduler.py decides which
sequence gets pages first, and which one is preempted.
"""

from array import array
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Seq
from math import ceil, inf
from typing import TYPE_CHECKING, Protocol

from worker.kv_cache.pages import SCRATCH, PagePool, chunk_pages, window_pages
from worker.kv_cache.prefix_cache import PrefixCache
from worker.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from worker.scheduler.fetching import Fetching
    from worker.scheduler.recurrent_slots import States


class Journal(Protocol):
    """Is notified when pages of a sequence are published in the prefix cache, and when the cache is emptied."""

    def stored(self, sequence: Sequence, pages: range) -> None: ...
    def cleared(self) -> None: ...


class Paging:
    """Gives pages to sequences, from one pool for each group of layers.

    watermark: the share of a pool that claim() leaves free, so that running sequences can grow.
    chunk: the maximum number of tokens of a sequence that a step computes.
    states: gives slots for recurrent states; None if no layer has a recurrent state.
    """

    def __init__(
        self, pools: Seq[PagePool], prefix_cache: bool, watermark: float, chunk: int, states: "States | None" = None
    ) -> None:
        self.pools = tuple(pools)
        self.states = states
        self.page_size = pools[0].page_size
        self.prefix = PrefixCache(pools, states.pool if states else None) if prefix_cache else None
        self.journals: list[Journal] = []
        self.fetching: Fetching | None = None  # the K/V store; None without one
        self._all = [*pools, states.pool] if states else [*pools]
        self._chunk = chunk
        self._windowed = [(group, pool) for group, pool in enumerate(pools) if pool.window]
        self._watermarks = [self._watermark(pool, watermark) for pool in pools]
        # the sequence that was refused last, and how many pages of each pool were available then
        self._last_refused: tuple[Sequence | None, list[int]] = (None, [])

    @property
    def most_in_flight(self) -> float:
        """How many tokens of a sequence may be in flight, at most, when its next chunk is planned in a pipeline.

        A sequence has two slots for recurrent states, and in a group with a window pages for two chunks
        (worker/kv_cache/pages.py).
        """
        if self.states is not None:
            return 0
        return self._chunk if self._windowed else inf

    def fits(self, tokens: int) -> bool:
        """Whether the pools, if nothing else used them, could hold a sequence of `tokens` tokens."""
        return all(self._most_pages(pool, tokens) <= pool.usable for pool in self.pools)

    def claim(self, sequence: Sequence, *, alone: bool) -> bool:
        """Gives a sequence pages for all its known tokens; in a group with a window, for one window and the next chunk.

        Pages of a cached prefix are shared, and their tokens count as computed.

        Returns False and changes nothing if fewer pages than the watermark would be left, or if there are too few
        slots. alone: whether no other sequence runs; the watermark is then ignored.
        """
        if not self._claim(sequence, sequence.cacheable_tokens, alone=alone):
            return False
        if self.prefix is not None:
            self.prefix.count(sequence.known_len, sequence.computed_tokens)
        if self.fetching is not None:
            self.fetching.admitted(sequence)
        return True

    def claim_again(self, sequence: Sequence) -> None:
        """Gives a sequence that has computed nothing the pages that the prefix cache has by now, instead of its own."""
        before = sequence.computed_tokens
        self.free(sequence)
        for most in (sequence.cacheable_tokens, before):  # a longer prefix may need more pages, for a window
            if self._claim(sequence, most, alone=True):
                break
            self._last_refused = (None, [])
        found = sequence.computed_tokens - before
        if not sequence.history.preemptions:
            sequence.prefix.cached_tokens += found
        if self.prefix is not None:
            self.prefix.count(0, found)

    def _claim(self, sequence: Sequence, most: int, *, alone: bool) -> bool:
        """Does what claim() does, but looks up only the first `most` tokens, and does not count them."""
        available = [pool.available for pool in self._all]
        refused, then = self._last_refused
        if refused is sequence and all(now <= before for now, before in zip(available, then, strict=True)):
            return False  # nothing was freed since the last refusal, so a long prompt is not looked up at every step
        shared = self._match(sequence, most)
        computed = len(shared[0]) * self.page_size
        state = self._state(sequence, len(shared[0]))
        fresh = [self._claimed(pool, sequence.known_len, computed) - len(shared[0]) for pool in self.pools]
        for pool, pages, count, watermark in zip(self.pools, shared, fresh, self._watermarks, strict=True):
            revived = sum(not pool.owned(page) for page in pages if page != SCRATCH)
            if count + revived > pool.available - (0 if alone else watermark):
                self._last_refused = (sequence, available)
                return False
        if self.states is not None and not self.states.has_free(state):
            self._last_refused = (sequence, available)
            return False
        self._last_refused = (None, [])
        for pool, pages, count in zip(self.pools, shared, fresh, strict=True):
            for page in pages:
                if page != SCRATCH:
                    pool.share(page)
            pages += pool.acquire(count) or []
        # a new list object, because worker/model_runner recognizes the sequence's pages by the identity of the list
        sequence.pages = [array("i", pages) for pages in shared]
        sequence.capacity = self._capacity(sequence)
        sequence.computed_tokens = sequence.prefix.claimed_tokens = computed
        if self.states is not None:
            self.states.claim(sequence, state)
        return True

    def grow(self, sequence: Sequence, end: int) -> bool:
        """Adds pages until the first `end` tokens have slots. Returns False and changes nothing if the pool has too few
        pages."""
        needed = -(-end // self.page_size)
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            if needed - len(pages) > pool.available:
                return False
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            if needed > len(pages):
                pages.extend(pool.acquire(needed - len(pages)) or [])
        sequence.capacity = self._capacity(sequence)
        return True

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Publishes the pages that became full when the K/V of positions start .. end-1 was written."""
        if self.prefix is None:
            return
        size = self.page_size
        known = sequence.prefix
        self.prefix.extend(known.digests, sequence.tokens, known.salt, end // size, known.mark)
        self.prefix.publish(known.digests, sequence.pages, range(start // size, end // size))
        for journal in self.journals:
            journal.stored(sequence, range(start // size, end // size))

    def clear_prefixes(self) -> None:
        """Empties the prefix cache for sequences that are submitted from now on."""
        if self.prefix is not None:
            self.prefix.clear()
        for journal in self.journals:
            journal.cleared()

    def return_behind(self, sequence: Sequence) -> None:
        """Gives back the pages that have left the sliding window, because the next rows no longer read them.

        Call it only when the results of a step are applied, because a step that is repeated reads the same pages again.
        """
        for group, pool in self._windowed:
            pages, first = sequence.pages[group], pool.first_needed(sequence.computed_tokens)
            begin = first
            while begin and pages[begin - 1] != SCRATCH:
                begin -= 1
            if begin < first:
                pool.release(pages[begin:first])
                pages[begin:first] = array("i", [SCRATCH]) * (first - begin)

    def move_windows(self, sequence: Sequence, computed: int) -> bool:
        """Gives a sequence that has `computed` tokens from elsewhere the pages of its windows after them.

        Call it before `computed_tokens` is set. Returns False and changes nothing if a pool has too few pages.
        """
        moved = list(sequence.pages)
        for group, pool in self._windowed:
            behind = [page for page in moved[group][: pool.first_needed(computed)] if page != SCRATCH]
            more = self._more_pages(pool, sequence, group, computed)
            if more > pool.available + sum(not pool.is_shared(page) for page in behind):
                return False
        for group, pool in self._windowed:
            pages, first = moved[group], pool.first_needed(computed)
            more = self._more_pages(pool, sequence, group, computed)
            pool.release(page for page in pages[:first] if page != SCRATCH)
            fresh = array("i", pool.acquire(more) or [])
            moved[group] = array("i", [SCRATCH]) * first + pages[first:] + fresh
        sequence.pages = moved  # new list objects, as in claim()
        sequence.capacity = self._capacity(sequence)
        return True

    def _more_pages(self, pool: PagePool, sequence: Sequence, group: int, computed: int) -> int:
        entries = max(len(sequence.pages[group]), pool.first_needed(computed))
        return max(0, self._claimed(pool, sequence.known_len, computed) - entries)

    def free(self, sequence: Sequence) -> None:
        if self.fetching is not None:
            self.fetching.cancel(sequence)
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            pool.release(page for page in pages if page != SCRATCH)
        sequence.pages, sequence.capacity = [], 0  # a new list: a step in flight may still read the old one
        if self.states is not None:
            self.states.free(sequence)

    def check(self, running: Collection[Sequence]) -> None:
        """Raises AssertionError unless the owned pages are exactly those that the running sequences need."""
        for group, pool in enumerate(self.pools):
            pool.check()
            owners: Counter[int] = Counter()
            for sequence in running:
                pages, computed = sequence.pages[group], sequence.computed_tokens
                kept = [page for page in pages if page != SCRATCH]
                owners.update(kept)
                assert kept == pages.tolist()[len(pages) - len(kept) :], f"{sequence.key} has a page behind a gap"
                assert len(pages) - len(kept) <= pool.first_needed(computed), f"{sequence.key} lacks a page"
                assert len(kept) <= self._most_pages(pool, len(pages) * self.page_size), f"{sequence.key} has too many"
            assert owners == pool.owners(), "the pool's owners are not the running sequences"
        for sequence in running:
            capacity = sequence.capacity
            assert capacity == self._capacity(sequence), f"{sequence.key}: a capacity of {capacity} tokens is wrong"
            assert sequence.computed_tokens <= capacity, f"{sequence.key}: more tokens computed than have slots"
        if self.states is not None:
            self.states.check(running)

    def _match(self, sequence: Sequence, most: int) -> list[list[int]]:
        if self.prefix is None or not most:
            return [[] for _ in self.pools]
        known = sequence.prefix
        return self.prefix.match(known.digests, sequence.tokens, known.salt, most, known.mark)

    def _state(self, sequence: Sequence, pages: int) -> int | None:
        """Returns the slot of the cached recurrent state after the first `pages` pages, or None."""
        return self.states.pool.find(sequence.prefix.digests[pages - 1]) if self.states is not None and pages else None

    def _claimed(self, pool: PagePool, tokens: int, computed: int) -> int:
        """Returns how many entries the sequence's page list has after claim(), including those before its window."""
        every = pool.pages_for(tokens)
        if not pool.window:
            return every
        window = pool.first_needed(computed) + window_pages(pool.window, self.page_size)
        return min(every, max(window, pool.pages_for(computed + self._chunk)))

    def _most_pages(self, pool: PagePool, tokens: int) -> int:
        """Returns the maximum number of pages that a sequence of `tokens` tokens owns at the same time."""
        every = pool.pages_for(tokens)
        if not pool.window:
            return every
        return min(every, window_pages(pool.window, self.page_size) + chunk_pages(self._chunk, self.page_size))

    def _watermark(self, pool: PagePool, share: float) -> int:
        """Returns how many pages of a pool claim() leaves free.

        A windowed group whose pool is smaller than that of every group without a window also needs free pages for the
        later chunks of prompts, because claim() gives only pages for a window or the first chunk there.
        """
        pages = ceil(share * pool.usable)
        if not pool.window or any(pool.usable >= other.usable for other in self.pools if not other.window):
            return pages
        return max(pages, min(pool.pages_for(self._chunk), pool.usable // 2))

    def _capacity(self, sequence: Sequence) -> int:
        return min(map(len, sequence.pages)) * self.page_size
