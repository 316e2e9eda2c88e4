"""The prefix cache: finds equal prefixes of one cache salt and nothing else, and hashes no token twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.prefix_identity import PrefixIdentity
from worker.kv_cache import pages as pages_module
from worker.kv_cache import prefix_cache
from worker.kv_cache.pages import SCRATCH, PagePool
from worker.kv_cache.prefix_cache import PrefixCache

PAGE = 4


def publish(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    """Puts `tokens` on new pages, publishes the full pages and releases all pages. Returns the pages."""
    digests: list[bytes] = []
    [pool] = cache.pools
    pages = pool.acquire(pool.pages_for(len(tokens))) or []
    full = len(tokens) // PAGE
    cache.extend(digests, tokens, salt, full)
    cache.publish(digests, [pages], range(full))
    pool.release(pages)
    return pages


def match(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    [pages] = cache.match([], tokens, salt)
    return pages


def test_match_finds_the_longest_prefix_of_full_pages() -> None:
    cache = PrefixCache([PagePool(20, PAGE)])
    pages = publish(cache, list(range(10)))
    assert match(cache, list(range(10))) == pages[:2]
    assert match(cache, [*range(8), 99, 98, 97, 96, 95]) == pages[:2]
    assert match(cache, [*range(7), 99, 98]) == pages[:1]
    assert match(cache, [*range(3), 99, 4, 5, 6, 7, 8]) == []


def test_match_leaves_at_least_one_token_to_compute() -> None:
    cache = PrefixCache([PagePool(20, PAGE)])
    pages = publish(cache, list(range(8)))
    assert match(cache, list(range(8))) == pages[:1]
    assert match(cache, list(range(9))) == pages[:2]
    assert match(cache, list(range(4))) == []
    assert match(cache, [0]) == []


def test_match_of_equal_pages_behind_different_prefixes_finds_none() -> None:
    cache = PrefixCache([PagePool(20, PAGE)])
    publish(cache, [1, 1, 1, 1, 5, 6, 7, 8])
    assert match(cache, [5, 6, 7, 8, 9]) == []
    assert match(cache, [2, 2, 2, 2, 5, 6, 7, 8, 9]) == []


def test_match_needs_an_equal_cache_salt() -> None:
    cache = PrefixCache([PagePool(20, PAGE)])
    pages = publish(cache, list(range(8)), salt="tenant")
    assert match(cache, list(range(9))) == []
    assert match(cache, list(range(9)), salt="other") == []
    assert match(cache, list(range(9)), salt="tenant") == pages


@pytest.mark.parametrize(
    ("identity", "generation", "digest"),
    [
        (PrefixIdentity(), 0, "d4d00d125b98b321"),
        (PrefixIdentity("s"), 0, "2360835e661aac0a"),
        (PrefixIdentity("s", "alice"), 0, "e50c9e73f6ab46f1"),
        (PrefixIdentity("s", "alice"), 1, "ca1c2b2b9a49b64b"),
    ],
    ids=["plain", "salt", "tenant", "emptied"],
)
def test_digests_begin_with_the_identity_of_the_prefix(identity: PrefixIdentity, generation: int, digest: str) -> None:
    cache, digests = PrefixCache([PagePool(20, PAGE)]), list[bytes]()
    for _ in range(generation):
        cache.clear()
    cache.extend(digests, list(range(8)), identity.text, 2)
    assert digests[1].hex()[:16] == digest


def test_match_of_an_evicted_prefix_finds_none_until_it_is_published_again() -> None:
    pool = PagePool(4, PAGE)
    cache = PrefixCache([pool])
    pages = publish(cache, list(range(12)))
    pool.share(pages[1])
    pool.share(pages[2])
    taken = pool.acquire(1)
    assert taken == pages[:1]
    assert match(cache, list(range(13))) == []
    digests: list[bytes] = []
    cache.extend(digests, list(range(4)), "", 1)
    cache.publish(digests, [taken or []], range(1))
    assert match(cache, list(range(13))) == pages
    pool.check()


def test_extend_hashes_no_page_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bytes] = []
    digest = prefix_cache._digest

    def counted(data: bytes) -> bytes:
        calls.append(data)
        return digest(data)

    monkeypatch.setattr(prefix_cache, "_digest", counted)
    cache, digests, tokens = PrefixCache([PagePool(20, PAGE)]), list[bytes](), list(range(9))
    for length in range(9, 41):
        cache.match(digests, tokens, "")
        cache.extend(digests, tokens, "", length // PAGE)
        tokens.append(length)
    assert len(digests) == 10
    assert len(calls) == 10 + 1, "ten pages and the root"


@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=6), st.integers(1, 24))
def test_match_is_exactly_the_longest_published_prefix(published: list[list[int]], length: int) -> None:
    cache = PrefixCache([PagePool(100, PAGE)])
    for tokens in published:
        publish(cache, tokens)
    query = (published[0] * 24)[:length]
    chunks = {tuple(tokens[:end]) for tokens in published for end in range(PAGE, len(tokens) + 1, PAGE)}
    longest = 0
    while longest + PAGE < len(query) and tuple(query[: longest + PAGE]) in chunks:
        longest += PAGE
    assert len(match(cache, query)) * PAGE == longest


class WindowedCache:
    """A prefix cache over a group without a window and a group with a window of WINDOW tokens."""

    WINDOW = 6

    def __init__(self) -> None:
        self.full, self.windowed = PagePool(40, PAGE), PagePool(40, PAGE, self.WINDOW)
        self.cache = PrefixCache([self.full, self.windowed])

    def publish(self, tokens: list[int]) -> list[list[int]]:
        """Publishes all full pages in both groups. The pages stay owned."""
        digests: list[bytes] = []
        count = len(tokens) // PAGE
        pages = [pool.acquire(count) or [] for pool in self.cache.pools]
        self.cache.extend(digests, tokens, "", count)
        self.cache.publish(digests, pages, range(count))
        return pages

    def evict(self, pool: PagePool, pages: list[int]) -> None:
        pool.release(pages)
        taken = pool.acquire(pool.available) or []
        assert set(pages) <= set(taken)
        pool.release(taken)


@pytest.fixture
def windowed(monkeypatch: pytest.MonkeyPatch) -> WindowedCache:
    monkeypatch.setattr(pages_module, "KEY_BLOCK", 2)
    return WindowedCache()


def test_match_needs_only_the_window_before_the_next_row(windowed: WindowedCache) -> None:
    tokens = list(range(32))
    full, own = windowed.publish(tokens)
    windowed.evict(windowed.windowed, own[:5])
    # the row at position 28 attends to positions 23 .. 28, and its kernel reads from 22 on: pages 5 and 6
    assert windowed.cache.match([], tokens, "") == [full[:7], [SCRATCH] * 5 + own[5:7]]


def test_match_goes_back_to_where_the_window_is_whole(windowed: WindowedCache) -> None:
    tokens = list(range(32))
    full, own = windowed.publish(tokens)
    windowed.evict(windowed.windowed, own[5:6])
    # after 5 pages, the row at position 20 reads pages 3 and 4; after 6 or 7 pages, rows would read page 5
    assert windowed.cache.match([], tokens, "") == [full[:5], [SCRATCH] * 3 + own[3:5]]
    windowed.evict(windowed.windowed, own[:5])
    assert windowed.cache.match([], tokens, "") == [[], []]


def test_match_needs_all_pages_of_the_group_without_a_window(windowed: WindowedCache) -> None:
    tokens = list(range(32))
    full, own = windowed.publish(tokens)
    windowed.evict(windowed.full, full[2:3])
    assert windowed.cache.match([], tokens, "") == [full[:2], own[:2]]


def test_match_with_windows_only() -> None:
    pool = PagePool(100, PAGE, 150)
    cache = PrefixCache([pool])
    pages = publish(cache, list(range(300)))
    assert match(cache, list(range(300))) == [SCRATCH] * 32 + pages[32:74], (
        "from position 128, the beginning of a block"
    )


def test_clear_forgets_cached_pages_and_hides_those_of_running_sequences() -> None:
    cache = PrefixCache([PagePool(20, PAGE)], PagePool(20, PAGE))
    [pool], states = cache.pools, cache.states
    publish(cache, list(range(9)))
    running, digests = pool.acquire(2) or [], list[bytes]()
    cache.extend(digests, list(range(50, 58)), "", 2)
    cache.publish(digests, [running], range(2))
    assert states is not None
    slot, gone = states.acquire(2) or []
    states.publish(slot, digests[1])
    states.publish(gone, digests[0])
    states.release([gone])
    cache.clear()
    assert (pool.counts().cached, states.counts().cached, pool.counts().owned) == (0, 0, 2)
    assert states.is_published(slot), "its owner must not write there"
    assert match(cache, list(range(9))) == match(cache, list(range(50, 59))) == []
    pool.release(running)
    states.release([slot])
    pool.check()
    states.check()
    assert match(cache, list(range(50, 59))) == []


def test_cache_fills_again_after_clear() -> None:
    cache = PrefixCache([PagePool(20, PAGE)])
    publish(cache, list(range(8)))
    cache.clear()
    pages = publish(cache, list(range(8)))
    assert match(cache, list(range(9))) == pages
