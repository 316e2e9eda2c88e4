"""Reports the prefixes in the prefix cache to this server's frontends, as a part of every Status.

A prefix is identified by its key (shared/prefix_identity.py). It is reported only for a few lengths, and only while the
page at its end is in the cache. The compute loop notes which prefixes were stored and evicted; the I/O thread makes a
report for each Status. A report has the changes since the last report. Because a Status may be lost, it also has a part
of all keys. After a sweep through all parts, a frontend that missed changes knows all keys again.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping

from shared.messages import CachedPrefixes
from shared.prefix_identity import PREFIX_LENGTHS, prefix_keys
from shared.wire.codec import pack_u32
from worker.kv_cache.pages import PagePool
from worker.kv_cache.prefix_cache import PrefixCache
from worker.schedule.paging import Paging
from worker.schedule.sequence import Key, Sequence

MAX_KEYS = 1024  # the maximum number of keys; the least recently used ones are dropped
MAX_CHANGES = 256  # changes in one report; more changes come with the next report
SAMPLE = 32  # how many waiting sequences _saved_tokens() looks at
PART = 64  # keys of the sweep in one report


class PrefixReport:
    """The keys of the prefixes in the prefix cache, and the changes since the last report."""

    def __init__(self, pool: PagePool, cache: PrefixCache, live: Mapping[Key, Sequence]) -> None:
        self._cache, self._live = cache, live
        self._size = pool.page_size
        self._ends = [(length // pool.page_size - 1, length) for length in PREFIX_LENGTHS if length >= pool.page_size]
        self._keys: OrderedDict[bytes, int] = OrderedDict()  # digest of the last page → key; the last used is last
        self._changes: deque[tuple[int, bool]] = deque()  # (key, whether it was added or removed)
        self._told: dict[int, None] = {}  # the keys that a frontend knows if it has seen every report
        self._check = 0  # the xor of all keys in _told
        self._sweep: list[int] = []
        self._at = 0
        self._waiting: dict[Key, list[tuple[int, int]]] = {}  # (length, key) of the prefixes of waiting sequences

    @classmethod
    def of(cls, paging: Paging, live: Mapping[Key, Sequence]) -> "PrefixReport":
        """Returns a report that the scheduler writes to from now on. Raises ValueError if there is no prefix cache.

        live: all live sequences of the scheduler; the report reads the waiting ones
        """
        if paging.prefix is None:
            raise ValueError("there is no prefix cache")
        pool = next((pool for pool in paging.pools if not pool.window), paging.pools[0])
        report = cls(pool, paging.prefix, live)
        pool.on_unpublish.append(report.evicted)
        paging.journals.append(report)
        return report

    # the compute loop

    def stored(self, sequence: Sequence, pages: range) -> None:
        """Notes the prefixes of a sequence that end in these pages. Known prefixes count as used now."""
        known = sequence.prefix
        first = pages.start * self._size == known.cached_tokens
        if known.mark is not None or not self._ends or not (first or pages.start <= self._ends[-1][0]):
            return
        new = list[tuple[bytes, int]]()
        for index, length in self._ends:
            if index >= pages.stop:
                break
            digest = known.digests[index]
            if digest in self._keys:
                self._keys.move_to_end(digest)
            elif index >= pages.start:
                new.append((digest, length))
        if new and self._is_current(sequence):
            self._add(new, sequence)

    def _is_current(self, sequence: Sequence) -> bool:
        """Whether new prompts can find the pages of a sequence. False if it ran when the cache was emptied."""
        first: list[bytes] = []
        self._cache.extend(first, sequence.tokens, sequence.prefix.salt, 1)
        return first[0] == sequence.prefix.digests[0]

    def _add(self, new: list[tuple[bytes, int]], sequence: Sequence) -> None:
        tokens = pack_u32(sequence.tokens[: new[-1][1]])
        keys = dict(zip(PREFIX_LENGTHS, prefix_keys(tokens, sequence.prefix.salt), strict=False))
        for digest, length in new:
            self._keys[digest] = keys[length]
            self._changes.append((keys[length], True))
        while len(self._keys) > MAX_KEYS:
            self._changes.append((self._keys.popitem(last=False)[1], False))

    def evicted(self, digest: bytes) -> None:
        key = self._keys.pop(digest, None)
        if key is not None:
            self._changes.append((key, False))

    def cleared(self) -> None:
        self._changes.extend((key, False) for key in self._keys.values())
        self._keys.clear()

    # the I/O thread

    def take(self) -> CachedPrefixes:
        """Returns the report for a Status. It must be sent, because the next report has only the changes after it."""
        changed: dict[int, bool] = {}
        for _ in range(min(MAX_CHANGES, len(self._changes))):
            key, came = self._changes.popleft()
            if came != (key in self._told):
                self._check ^= key
                changed[key] = came
                if came:
                    self._told[key] = None
                else:
                    del self._told[key]
        if self._at >= len(self._sweep):
            self._sweep, self._at = list(self._told), 0
        first = self._at
        self._at = min(first + PART, len(self._sweep))
        return CachedPrefixes(
            pack_u32(key for key, came in changed.items() if came),
            pack_u32(key for key, came in changed.items() if not came),
            self._check,
            first,
            self._at,
            len(self._sweep),
            pack_u32(key for key in self._sweep[first : self._at] if key in self._told),
            self._saved_tokens(),
        )

    def _saved_tokens(self) -> int:
        """Estimates how many tokens of waiting sequences are cached, from the sequences that have waited longest."""
        waiting = [one for one in tuple(self._live.values()) if not one.pages]
        sample = waiting[:SAMPLE]
        self._waiting = {one.key: self._waiting.get(one.key) or _keys(one) for one in sample}
        found = sum(
            next((length for length, key in reversed(keys) if key in self._told), 0) for keys in self._waiting.values()
        )
        return found * len(waiting) // max(1, len(sample))


def _keys(sequence: Sequence) -> list[tuple[int, int]]:
    """Returns (length, key) for the prefixes of a waiting sequence."""
    if sequence.prefix.mark is not None:
        return []
    tokens = pack_u32(sequence.tokens[: PREFIX_LENGTHS[-1]])
    return list(zip(PREFIX_LENGTHS, prefix_keys(tokens, sequence.prefix.salt), strict=False))
