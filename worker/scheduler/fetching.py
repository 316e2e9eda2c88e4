"""Connects the scheduler with the K/V store (worker/kv_cache/store.py): what is written, and who fetches.

A running sequence that is *fetching* owns its pages and is in no plan until its prefix has arrived from the store or
the fetch has failed. It begins to fetch when its first chunk would be planned, if the prefix cache does not have the
rest of its prompt. What arrives is copied into its own pages between steps, a few files at a time. When all has
arrived, the pages are published in the prefix cache.

Pages are written when a block of them is complete, and recurrent states when a checkpoint is published. A sequence that
ran when the cache was emptied writes nothing more.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from shared.messages import Prefill
from worker.kv_cache.pages import SCRATCH
from worker.kv_cache.store import Fetch, KvStore, Part, Run
from worker.kv_cache.store_tier import PAGES, STATE
from worker.scheduler.paging import Paging
from worker.scheduler.recurrent_slots import States
from worker.scheduler.sequence import Sequence

MOST_REPAIRED = 4  # blocks that are in memory, but not in the store, and are written when a sequence finds them
COPY_S = 0.01  # time limit for copying pages between two steps; one file is copied in any case
STALL_S = {True: 5.0, False: 1.0}  # the longest wait for the next part; True: with --kv-store-fetch always
LEAST_WAIT_S = 0.25  # how long a sequence waits for all parts even if computing would be faster


@dataclass(slots=True)
class StoredPrefix:
    """What the store knows of a sequence. digests: of its first full pages; equal in all processes.

    resets: how often the cache had been emptied when the sequence began
    """

    resets: int
    digests: list[bytes] = field(default_factory=list)
    asked: bool = False  # whether the store was asked since the sequence got its pages
    state_at: int = 0  # how many tokens the last recurrent state covers that is in the store, or was in the cache


class Fetching:
    """token_s: returns how long computing a token of a prompt takes, in seconds; 0: not known yet."""

    def __init__(
        self, store: KvStore, paging: Paging, states: States | None, token_s: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """clock: seconds, which limit how long pages are copied"""
        assert paging.prefix is not None
        self._store, self._paging, self._states, self._token_s, self._clock = store, paging, states, token_s, clock
        self._prefix = paging.prefix
        self._identity = store.pages.space.hex()
        self._active: dict[Fetch, Sequence] = {}
        self._resets = 0
        self._nonce = self._done_nonce = 0
        self._now = 0.0
        self.hits = 0  # tokens that came from the store
        self.failed = 0  # fetches that ended before all that was found had come
        paging.fetching = self
        paging.journals.append(self)
        if states is not None:
            states.on_publish.append(self.published_state)

    # which sequences wait

    @property
    def waiting(self) -> int:
        """How many running sequences are fetching."""
        return len(self._active)

    @property
    def ready(self) -> bool:
        """Whether advance() has something to do."""
        return bool(self._store.results)

    @property
    def next_deadline(self) -> float:
        """When the first sequence gives up, by the loop's clock; inf if none waits."""
        return min([fetch.deadline for fetch in self._active], default=inf)

    @property
    def confirmed_reset(self) -> int:
        """The nonce of the latest reset that all tiers have done; 0: there was none."""
        if self._nonce != self._done_nonce and self._store.has_reset(self._nonce):
            self._done_nonce = self._nonce
        return self._done_nonce

    def admitted(self, sequence: Sequence) -> None:
        """Notes that a sequence got pages, with what the prefix cache had."""
        known = sequence.prefix
        if known.stored is None:
            known.stored = StoredPrefix(self._resets)
        known.stored.asked, known.stored.state_at = False, sequence.computed_tokens
        if sequence.computed_tokens:
            self._touch(sequence)

    def begins(self, sequence: Sequence) -> bool:
        """Whether a sequence that has computed nothing yet waits for the store from now on."""
        stored, size = sequence.prefix.stored, self._paging.page_size
        if stored is None or stored.asked or stored.resets != self._resets:
            return False
        handed_over = sequence.history.prefill is Prefill.DONE  # it waits even until a thread can read for it
        if not (self._store.usable if handed_over else self._store.can_fetch):
            return False
        start = sequence.computed_tokens // size
        full = min(len(sequence.tokens) - 1, sequence.cacheable_tokens) // size
        least = 1 if self._states is not None else self._store.pages.block - start % self._store.pages.block
        if full - start < least:
            return False
        stored.asked = True
        self._extend(sequence, full)
        token_s = self._token_s()
        fetch = Fetch(stored.digests[:full], start, token_s, copied=start)
        if not self._store.always and token_s:
            fetch.latest = self._now + max(LEAST_WAIT_S, (full - start) * size * token_s)
        fetch.deadline = min(fetch.latest, self._now + STALL_S[self._store.always])
        self._active[fetch] = sequence
        sequence.fetch = fetch
        self._store.fetch(fetch)
        return True

    def cancel(self, sequence: Sequence) -> None:
        """Ends the fetch of a sequence whose pages are freed."""
        fetch, sequence.fetch = sequence.fetch, None
        if fetch is not None:
            fetch.cancelled = True
            del self._active[fetch]

    def advance(self, now: float) -> None:
        """Copies what has come, and lets sequences go on whose prefix is complete or late. Called between steps."""
        self._now = now
        if not self._active and not self._store.results:
            return
        until = self._clock() + COPY_S
        while (result := self._store.take()) is not None:
            fetch = result.fetch
            if fetch.cancelled:
                continue
            if isinstance(result, Part):
                self._copy(self._active[fetch], result)
                fetch.deadline = min(fetch.latest, now + STALL_S[self._store.always])
                if self._clock() > until:
                    break
            else:
                self._finish(fetch, complete=result.complete)
        for fetch in [fetch for fetch in self._active if now >= fetch.deadline and not self._store.results]:
            self._finish(fetch, complete=False)

    # what has come

    def _copy(self, sequence: Sequence, part: Part) -> None:
        """Copies a part into pages of groups without a window, and keeps what windows and states need of it."""
        fetch, pages, end = part.fetch, self._store.pages, part.first + part.pages
        if part.first > fetch.copied:
            return  # a part before this one is missing
        groups, state = pages.split(part.payload, part.pages, part.absent)
        size = self._paging.page_size
        for group, (pool, data) in enumerate(zip(self._paging.pools, groups, strict=True)):
            first = part.first + part.absent[group]
            if pool.window:
                if end > pool.first_needed(fetch.target * size) and end > fetch.start:
                    fetch.windows.setdefault(group, []).append((first, data.clone()))
                continue
            begin = max(first, fetch.start)
            if begin < end:
                pages.scatter(group, data, begin - first, sequence.pages[group][begin:end])
        fetch.copied = max(fetch.copied, end)
        self._store.remember(fetch.digests[end - 1], STATE if part.state else PAGES)
        if part.state:
            fetch.state = state.clone()

    def _finish(self, fetch: Fetch, *, complete: bool) -> None:
        """Lets a sequence go on, from where what has come reaches."""
        sequence, size = self._active.pop(fetch), self._paging.page_size
        sequence.fetch, fetch.cancelled = None, True  # a part that comes late is not copied
        whole = any(pool.window for pool in self._paging.pools) or self._states is not None
        complete &= fetch.copied == fetch.target
        end = fetch.copied if complete or not whole else fetch.start
        self.failed += bool(fetch.target) and not complete
        if end <= fetch.start or not self._place_windows(sequence, fetch, end):
            return
        if self._states is not None:
            assert fetch.state is not None
            self._store.pages.scatter_state(fetch.state, self._states.restored(sequence, end * size))
        found = end * size - sequence.computed_tokens
        begin, sequence.computed_tokens = sequence.computed_tokens, end * size
        sequence.prefix.claimed_tokens = end * size
        self._paging.publish(sequence, begin, end * size)
        if self._states is not None:
            self._states.publish_restored(sequence, end * size)
        if not sequence.history.preemptions:
            sequence.prefix.cached_tokens += found
        self._prefix.count(0, found)
        self.hits += found

    def _place_windows(self, sequence: Sequence, fetch: Fetch, end: int) -> bool:
        """Gives a sequence the pages of its windows after `end` pages, and fills them.

        Returns False if too few are free, or if a page has not come, because another process has replaced its file by
        one without it. The sequence then computes its prompt from where it was.
        """
        pages = self._store.pages
        for group, pool in enumerate(self._paging.pools):
            needed = (
                range(max(pool.first_needed(end * self._paging.page_size), fetch.start), end) if pool.window else ()
            )
            came = {
                first + at
                for first, data in fetch.windows.get(group, [])
                for at in range(data.numel() // pages.page_bytes[group])
            }
            if not came.issuperset(needed):
                return False
        if not self._paging.move_windows(sequence, end * self._paging.page_size):
            return False
        for group, runs in fetch.windows.items():
            own = sequence.pages[group]
            for first, data in runs:
                count = data.numel() // pages.page_bytes[group]
                for index in range(max(first, fetch.start), min(first + count, end)):
                    if own[index] != SCRATCH:
                        pages.scatter(group, data, index - first, own[index : index + 1])
        return True

    # what is written

    def stored(self, sequence: Sequence, pages: range) -> None:
        """Writes the blocks that became complete with these pages of a sequence."""
        size = self._store.pages.block
        if pages.stop // size == pages.start // size or not self._is_current(sequence):
            return
        self._extend(sequence, pages.stop // size * size)
        stored = sequence.prefix.stored
        assert stored is not None
        for end in range((pages.start // size + 1) * size, pages.stop + 1, size):
            if self._store.wants(stored.digests[end - 1], PAGES):
                self._write(sequence, PAGES, range(end - size, end))

    def published_state(self, sequence: Sequence, end: int, slot: int) -> None:
        """Writes a state after `end` tokens, with the pages since the last complete block.

        Only some of the states within a prompt or an answer are written, but the last of a prompt always is.
        """
        count, stored, size = end // self._paging.page_size, sequence.prefix.stored, self._store.pages.block
        if stored is None or not self._is_current(sequence):
            return
        ends_prompt = count == (sequence.prompt_len - 1) // self._paging.page_size
        if not ends_prompt and end - stored.state_at < self._store.pages.state_every:
            return
        stored.state_at = end
        self._extend(sequence, count)
        if self._store.wants(stored.digests[count - 1], STATE):
            self._write(sequence, STATE, range(count // size * size, count), slot)

    def _write(self, sequence: Sequence, kind: bytes, pages: range, slot: int | None = None) -> None:
        """Hands the pages of a sequence at these indices, and the state in a slot, over to the store."""
        own, absent = self._pages_of(sequence, pages)
        stored = sequence.prefix.stored
        assert stored is not None
        parent = stored.digests[pages.start - 1] if pages.start else b""
        run = Run(kind, stored.digests[pages.stop - 1], parent, pages.stop, len(pages), absent)
        self._store.write(run, self._store.pages.gather(own, slot), sequence.prefix.keep_s)

    def cleared(self) -> None:
        """Notes that sequences which run now must write nothing more."""
        self._resets += 1

    def reset(self, nonce: int) -> bool:
        """Empties the store. `confirmed_reset` has the nonce when that is done. Returns False if it was asked for
        already."""
        if nonce == self._nonce:
            return False
        self._nonce = nonce
        self._store.reset(nonce)
        return True

    def _is_current(self, sequence: Sequence) -> bool:
        stored = sequence.prefix.stored
        return stored is not None and stored.resets == self._resets

    def _extend(self, sequence: Sequence, pages: int) -> None:
        """Makes the digests of a sequence, which its own prefix cache does not share, for its first `pages` pages."""
        known = sequence.prefix
        assert known.stored is not None
        self._prefix.extend_from(
            self._identity.encode() + known.salt.encode(), known.stored.digests, sequence.tokens, pages, known.mark
        )

    def _pages_of(self, sequence: Sequence, indices: range) -> tuple[list[list[int]], tuple[int, ...]]:
        """Returns the pages of each group at these indices, and how many of the first ones a group no longer has."""
        found, absent = [], []
        for pool, pages in zip(self._paging.pools, sequence.pages, strict=True):
            own = list(pages[indices.start : indices.stop])
            for at, index in enumerate(indices):
                if own[at] == SCRATCH:  # it left the window; the prefix cache may still have it
                    own[at] = pool.find(sequence.prefix.digests[index]) or SCRATCH
            missing = len(own) - next((at for at, page in enumerate(reversed(own)) if page == SCRATCH), len(own))
            found.append(own[missing:])
            absent.append(missing)
        return found, tuple(absent)

    def _touch(self, sequence: Sequence) -> None:
        """Notes that the files of what a sequence found in memory were used."""
        size, count = self._store.pages.block, sequence.computed_tokens // self._paging.page_size
        self._extend(sequence, count)
        stored = sequence.prefix.stored
        assert stored is not None
        ends = range(size, count + 1, size)
        if not any(pool.window for pool in self._paging.pools):  # windows have only their last pages in memory
            missing = [end for end in ends if self._store.wants(stored.digests[end - 1], PAGES)]
            for end in missing if sequence.history.prefill is Prefill.ONLY else missing[:MOST_REPAIRED]:
                self._write(sequence, PAGES, range(end - size, end))
        files = [(stored.digests[end - 1], PAGES) for end in ends]
        if self._states is not None:
            files.append((stored.digests[count - 1], STATE))
        if files:
            self._store.used(files, sequence.prefix.keep_s)
