"""The page pool: which K/V pages are free, cached or owned. Plain ints: no tensors, no tokens.

A page is *free* (it holds nothing worth keeping), *cached* (it is published under a digest, has no owner, and can be
reused) or *owned* (by one sequence, or by several that share a published page). Page 0 is scratch: it is never handed
out, and padding rows use it.

One ordered dict is both the free list and the eviction order: free pages are at its front, and cached pages
follow from least to most recently released. Every operation takes O(1) per page.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from shared.messages import Pages

# What a sequence still needs, in plain integers: positions in a sliding window (the pages before them are freed), and
# slots of recurrent states.

KEY_BLOCK = 128  # kernels read keys in aligned blocks of at most this many positions, and mask keys outside the window


class StepSizes(Protocol):
    """The settings that limit how many tokens of a sequence a step computes."""

    @property
    def use_chunked_prefill(self) -> bool: ...
    @property
    def prefill_chunk_size(self) -> int: ...
    @property
    def max_step_tokens(self) -> int: ...


def first_kept(window: int, position: int) -> int:
    """Returns the first position that must be kept for rows at `position` and later. window 0: all are kept.

    This position begins a block of keys, although rows attend to only a part of the block. Kernels multiply the
    masked part by zero, and zero times NaN is NaN, so the whole block must be memory of the sequence itself.
    """
    return max(0, position - window + 1) // KEY_BLOCK * KEY_BLOCK if window else 0


def window_pages(window: int, page_size: int) -> int:
    """Returns the maximum number of pages that a sequence needs for its window between two steps.

    This is two more than the positions of the window fill: one because the window may begin and end within a page, and
    one because a page behind the window is returned only after a step.
    """
    return -(-(window + KEY_BLOCK) // page_size) + 2


def chunk_tokens(sizes: StepSizes, longest: int) -> int:
    """Returns the maximum number of tokens of one sequence in a step. longest: the maximum length of a sequence."""
    return min(sizes.prefill_chunk_size, sizes.max_step_tokens) if sizes.use_chunked_prefill else longest


def chunk_pages(chunk: int, page_size: int) -> int:
    """Returns the maximum number of pages that a sequence needs besides window_pages(). chunk: its tokens per step.

    These are the pages of two chunks, because one step may be planned while another one is in flight.
    """
    return -(-2 * chunk // page_size)


# Computes how many slots for recurrent states to make, in plain integers. A slot holds the states of all layers.


def slots_per_sequence(*, overlap: bool) -> int:
    """Returns how many slots each sequence has: one to read, and one to write for each step in flight."""
    return 3 if overlap else 2


def usable_slots(affordable: int, sequences: int, checkpoints: int, *, overlap: bool) -> int:
    """Returns how many slots to make, not counting the scratch slot.

    affordable: how many slots fit in the memory; sequences: how many sequences may run; checkpoints: how many states
    the prefix cache can use. The result is always enough for one sequence that begins with a cached state.
    """
    own = slots_per_sequence(overlap=overlap)
    return max(own + 1, min(affordable, own * sequences + max(1, checkpoints)))


SCRATCH = 0


class PagePool:
    """`total_pages` pages of `page_size` tokens; `usable` of them (all but the scratch page) are handed out.

    window: the sliding window of the group's layers; sequences keep only the pages of their window. 0: they keep all.
    """

    def __init__(self, total_pages: int, page_size: int, window: int = 0) -> None:
        if total_pages < 2 or page_size < 1:
            raise ValueError(f"a pool needs 2 pages of 1 token at least, not {total_pages} of {page_size}")
        self.page_size, self.window = page_size, window
        self.usable = total_pages - 1
        self._spare: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, total_pages))
        self._owners = [0] * total_pages
        self._digests: list[bytes | None] = [None] * total_pages
        self._published: dict[bytes, int] = {}
        self._cached = 0
        self.on_unpublish: list[Callable[[bytes], None]] = []  # called with the page's digest (engine/kv_events.py)

    @property
    def available(self) -> int:
        """The number of pages that acquire() can hand out: the free and the cached ones."""
        return len(self._spare)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def first_needed(self, position: int) -> int:
        """Returns the index, within a sequence, of the first page that rows at `position` and later need."""
        return first_kept(self.window, position) // self.page_size

    def counts(self) -> Pages:
        spare = len(self._spare)
        return Pages(free=spare - self._cached, cached=self._cached, owned=self.usable - spare, total=self.usable)

    def acquire(self, count: int) -> list[int] | None:
        """Hands out `count` pages to one owner, free pages before cached ones. Returns None if there are too few."""
        spare = self._spare
        if count > len(spare):
            return None
        pages = [spare.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
            self._unpublish(page)
        return pages

    def share(self, page: int) -> None:
        """Adds an owner to a published page, whether it is cached or owned."""
        if self._digests[page] is None:
            raise ValueError(f"page {page} is not published")
        if self._owners[page] == 0:
            del self._spare[page]
            self._cached -= 1
        self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Removes one owner from each page. pages: the pages in the order of their tokens.

        The last page is released first, so that the pages of a prefix are evicted from its end: a cached page can be
        found only while the pages before it are cached.
        """
        for page in reversed(list(pages)):
            owners = self._owners[page] - 1
            if owners < 0:
                raise ValueError(f"page {page} has no owner")
            self._owners[page] = owners
            if owners:
                continue
            self._spare[page] = None
            if self._digests[page] is None:
                self._spare.move_to_end(page, last=False)
            else:
                self._cached += 1

    def publish(self, page: int, digest: bytes) -> bool:
        """Lets find() return an owned page. Returns False and changes nothing if another page has this digest."""
        holder = self._published.get(digest)
        if holder is not None:
            return holder == page
        if not self._owners[page] or self._digests[page] is not None:
            raise ValueError(f"page {page} is not owned, or published as something else")
        self._published[digest] = page
        self._digests[page] = digest
        return True

    def forget_cached(self) -> None:
        """Makes all cached pages free. Published pages that are owned stay published."""
        for page in self._spare:
            self._unpublish(page)

    def find(self, digest: bytes) -> int | None:
        """Returns the page that is published under `digest`, or None."""
        return self._published.get(digest)

    def find_run(self, digests: Iterable[bytes]) -> list[int]:
        """Returns the pages that are published under these digests, up to the first digest without one."""
        pages: list[int] = []
        for digest in digests:
            page = self._published.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def owned(self, page: int) -> bool:
        return self._owners[page] > 0

    def is_shared(self, page: int) -> bool:
        return self._owners[page] > 1

    def is_published(self, page: int) -> bool:
        return self._digests[page] is not None

    def owners(self) -> dict[int, int]:
        """Returns the number of owners of each owned page."""
        return {page: owners for page, owners in enumerate(self._owners) if owners}

    def check(self) -> None:
        """Raises AssertionError unless every page is exactly one of free, cached or owned, and all counts agree."""
        spare, digests = self._spare, self._digests
        assert SCRATCH not in spare and not self._owners[SCRATCH], "the scratch page was handed out"
        assert digests[SCRATCH] is None, "the scratch page was published"
        for page in range(1, self.usable + 1):
            owners = self._owners[page]
            assert owners >= 0, f"page {page} has {owners} owners"
            assert (page in spare) == (owners == 0), f"page {page}: spare {page in spare}, owners {owners}"
        assert len(spare) <= self.usable, "the free list holds a page that does not exist"
        cached = [digests[page] is not None for page in spare]
        assert sum(cached) == self._cached, f"{sum(cached)} pages are cached, counted {self._cached}"
        assert cached == sorted(cached), "a plain free page stands behind a cached one"
        named = {digest: page for page, digest in enumerate(digests) if digest is not None}
        assert named == self._published, "digests of pages and pages of digests disagree"

    def _unpublish(self, page: int) -> None:
        digest = self._digests[page]
        if digest is not None:
            del self._published[digest]
            self._digests[page] = None
            self._cached -= 1
            for listener in self.on_unpublish:
                listener(digest)
