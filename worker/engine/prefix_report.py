"""In every Status, tells this server's frontends which prefixes are in the prefix cache or will be there soon.

A prefix is identified by its key (shared/prefix_identity.py), and reported only for a few lengths. It is reported while
the page at its end is in the cache, and while a prompt that begins with it waits or is being computed: in a long queue,
this is known seconds before the page exists.

The compute loop notes which prefixes were stored and evicted; the I/O thread looks at the live sequences and makes a
report for each Status. A report has the changes since the last report. Because a Status may be lost, each report also
repeats some of the current keys. Once all keys have been repeated, a frontend that missed changes knows them all again.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping

from shared.messages import CachedPrefixes
from shared.prefix_identity import PREFIX_LENGTHS, prefix_keys
from shared.wire import pack_u32
from worker.kv_cache.pages import PagePool
from worker.kv_cache.prefix_cache import PrefixCache
from worker.scheduler.paging import Paging
from worker.scheduler.sequence import Key, Sequence

MAX_KEYS = 1024  # the maximum number of cached keys; the least recently used ones are dropped
MAX_EXPECTED = 512  # the maximum number of keys of prompts that wait or are being computed; later prompts are left out
MAX_CHANGES = 256  # changes in one report; more changes come with the next report
SAMPLE = 32  # how many waiting sequences _saved_tokens() looks at
PART = 64  # how many keys of the sweep one report has


class PrefixReport:
    """The keys of the prefixes in the prefix cache, and the changes since the last report."""

    def __init__(self, pool: PagePool, cache: PrefixCache, live: Mapping[Key, Sequence]) -> None:
        self._cache, self._live = cache, live
        self._size = pool.page_size
        self._ends = [(length // pool.page_size - 1, length) for length in PREFIX_LENGTHS if length >= pool.page_size]
        # digest of a prefix's last page → key, the most recently used last
        self._keys: OrderedDict[bytes, int] = OrderedDict()
        self._changes: deque[tuple[int, bool]] = deque()  # (key, True: added to the cache; False: removed)
        self._cached: set[int] = set()  # the cached keys as of the last report
        self._expected: Counter[int] = Counter()  # key → how many prompts that wait or are being computed have it
        self._prompts: dict[Key, list[tuple[int, int]]] = {}  # sequence → (length, key) of its prompt's prefixes
        self._touched: deque[int] = deque()  # keys of prompts that came or left since the last report
        self._reported: dict[int, None] = {}  # the keys that a frontend knows if it has seen every report
        self._check = 0  # the xor of all keys in _reported
        self._sweep: list[int] = []
        self._at = 0

    @classmethod
    def of(cls, paging: Paging, live: Mapping[Key, Sequence]) -> "PrefixReport":
        """Returns a report that the scheduler writes to from now on. Raises ValueError if there is no prefix cache.

        live: all live sequences of the scheduler
        """
        if paging.prefix is None:
            raise ValueError("there is no prefix cache")
        pool = next((pool for pool in paging.pools if not pool.window), paging.pools[0])
        report = cls(pool, paging.prefix, live)
        pool.on_unpublish.append(report.evicted)
        paging.journals.append(report)
        return report

    # called by the compute loop

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

    # called by the I/O thread

    def take(self) -> CachedPrefixes:
        """Returns the report for a Status. The caller must send it: the next report has only later changes."""
        changed = self._take_changes()
        if self._at >= len(self._sweep):
            self._sweep, self._at = list(self._reported), 0
        first = self._at
        self._at = min(first + PART, len(self._sweep))
        return CachedPrefixes(
            pack_u32(key for key, came in changed.items() if came),
            pack_u32(key for key, came in changed.items() if not came),
            self._check,
            first,
            self._at,
            len(self._sweep),
            pack_u32(key for key in self._sweep[first : self._at] if key in self._reported),
            self._saved_tokens(),
        )

    def _take_changes(self) -> dict[int, bool]:
        """Returns keys that were added (True) or removed since the last report, at most MAX_CHANGES."""
        self._follow_prompts()
        changed: dict[int, bool] = {}
        left = MAX_CHANGES
        while left and self._changes:
            key, came = self._changes.popleft()
            if came:
                self._cached.add(key)
            else:
                self._cached.discard(key)
            self._tell(key, changed)
            left -= 1
        while left and self._touched:
            self._tell(self._touched.popleft(), changed)
            left -= 1
        return changed

    def _tell(self, key: int, changed: dict[int, bool]) -> None:
        known = key in self._cached or key in self._expected
        if known != (key in self._reported):
            self._check ^= key
            changed[key] = known
            if known:
                self._reported[key] = None
            else:
                del self._reported[key]

    def _follow_prompts(self) -> None:
        """Adds new prompts to _prompts, and removes prompts that are computed or whose sequence has ended."""
        live = {one.key: one for one in tuple(self._live.values()) if one.computed_tokens <= one.prompt_len}
        for gone in self._prompts.keys() - live.keys():
            for _, key in self._prompts.pop(gone):
                self._expected[key] -= 1
                if not self._expected[key]:
                    del self._expected[key]
                    self._touched.append(key)
        for name, sequence in live.items():
            if len(self._expected) >= MAX_EXPECTED:
                break
            if name not in self._prompts:
                self._prompts[name] = _keys(sequence)
                for _, key in self._prompts[name]:
                    self._expected[key] += 1
                    self._touched.append(key)

    def _saved_tokens(self) -> int:
        """Estimates how many tokens of waiting sequences are cached, from the sequences that have waited longest."""
        waiting = [one for one in tuple(self._live.values()) if not one.pages]
        sample = waiting[:SAMPLE]
        found = sum([self._saved(self._prompts.get(one.key, [])) for one in sample])
        return found * len(waiting) // max(1, len(sample))

    def _saved(self, prompt: list[tuple[int, int]]) -> int:
        """Returns how many tokens of a waiting prompt will probably be cached when it is computed.

        If several prompts share a prefix that is not cached yet, the first one computes it for the others.
        """
        for length, key in reversed(prompt):
            if key in self._cached:
                return length
            if self._expected[key] > 1:
                return length * (self._expected[key] - 1) // self._expected[key]
        return 0


def _keys(sequence: Sequence) -> list[tuple[int, int]]:
    """Returns (length, key) for the prefixes of a prompt."""
    if sequence.prefix.mark is not None:
        return []
    tokens = pack_u32(sequence.tokens[: PREFIX_LENGTHS[-1]])
    return list(zip(PREFIX_LENGTHS, prefix_keys(tokens, sequence.prefix.salt), strict=False))
