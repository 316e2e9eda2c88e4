"""The page pool: acquire, share, release, publish. Free pages are acquired first, then the oldest cached pages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import Pages
from worker.kv_cache.pages import PagePool


def test_acquire_never_hands_out_the_scratch_page() -> None:
    pool = PagePool(5, 16)
    pages = pool.acquire(4)
    assert pages is not None and sorted(pages) == [1, 2, 3, 4]
    assert pool.acquire(1) is None
    assert pool.counts() == Pages(free=0, cached=0, owned=4, total=4)


def test_acquire_gives_all_or_none() -> None:
    pool = PagePool(4, 1)
    assert pool.acquire(4) is None
    assert pool.available == 3
    assert pool.acquire(0) == []


def test_release_frees_a_page_unless_it_is_published() -> None:
    pool = PagePool(4, 1)
    pages = pool.acquire(3) or []
    pool.publish(pages[0], b"a")
    pool.release(pages)
    assert pool.counts() == Pages(free=2, cached=1, owned=0, total=3)
    assert pool.find(b"a") == pages[0]
    pool.check()


def test_acquire_takes_free_pages_first_then_the_oldest_cached() -> None:
    pool = PagePool(6, 1)
    first, second = pool.acquire(1) or [], pool.acquire(1) or []
    pool.publish(first[0], b"first")
    pool.publish(second[0], b"second")
    pool.release(second)
    pool.release(first)
    assert pool.acquire(3) is not None
    assert pool.find(b"first") and pool.find(b"second"), "three plain pages were left"
    assert pool.acquire(1) == second
    assert pool.find(b"second") is None and pool.find(b"first") == first[0]
    pool.check()


def test_acquire_evicts_a_chain_from_its_end() -> None:
    pool = PagePool(4, 1)
    pages = pool.acquire(3) or []
    for page, digest in zip(pages, (b"1", b"12", b"123"), strict=True):
        pool.publish(page, digest)
    pool.release(pages)
    assert [pool.acquire(1) for _ in range(3)] == [[page] for page in reversed(pages)]


def test_share_of_a_cached_page_makes_it_the_youngest() -> None:
    pool = PagePool(3, 1)
    old, young = pool.acquire(2) or []
    pool.publish(old, b"old")
    pool.publish(young, b"young")
    pool.release([old])
    pool.release([young])
    pool.share(old)
    pool.release([old])
    assert pool.acquire(1) == [young]


def test_release_by_the_last_owner_frees_a_shared_page() -> None:
    pool = PagePool(2, 1)
    pages = pool.acquire(1) or []
    pool.publish(pages[0], b"a")
    pool.share(pages[0])
    pool.release(pages)
    assert pool.counts().owned == 1 and pool.acquire(1) is None
    pool.release(pages)
    assert pool.counts() == Pages(free=0, cached=1, owned=0, total=1)
    pool.check()


def test_publish_of_a_digest_twice_keeps_the_first_page() -> None:
    pool = PagePool(3, 1)
    first, second = pool.acquire(2) or []
    assert pool.publish(first, b"a")
    assert not pool.publish(second, b"a")
    assert pool.publish(first, b"a"), "publishing again is harmless"
    assert pool.find(b"a") == first
    pool.release([first, second])
    assert pool.counts() == Pages(free=1, cached=1, owned=0, total=2)
    pool.check()


def test_misuse_raises() -> None:
    pool = PagePool(3, 1)
    with pytest.raises(ValueError, match="not published"):
        pool.share(1)
    with pytest.raises(ValueError, match="no owner"):
        pool.release([1])
    with pytest.raises(ValueError, match="not owned"):
        pool.publish(1, b"a")
    page = (pool.acquire(1) or [])[0]
    pool.publish(page, b"a")
    with pytest.raises(ValueError, match="something else"):
        pool.publish(page, b"b")
    with pytest.raises(ValueError, match="at least"):
        PagePool(1, 16)


def test_check_sees_a_leaked_page() -> None:
    pool = PagePool(3, 1)
    pool._spare.popitem()
    with pytest.raises(AssertionError, match="page 2"):
        pool.check()


def test_check_sees_a_lost_digest() -> None:
    pool = PagePool(3, 1)
    pages = pool.acquire(1) or []
    pool.publish(pages[0], b"a")
    del pool._published[b"a"]
    with pytest.raises(AssertionError, match="disagree"):
        pool.check()


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.tuples(st.sampled_from(["acquire", "release", "publish", "share"]), st.integers(0, 7)), max_size=60))
def test_random_use_keeps_the_invariants(operations: list[tuple[str, int]]) -> None:
    pool, held, named = PagePool(7, 2), list[list[int]](), dict[int, bytes]()
    for kind, number in operations:
        if kind == "acquire":
            free = pool.available
            pages = pool.acquire(number % 4)
            assert (pages is None) == (number % 4 > free)
            held += [pages] if pages else []
            named = {page: digest for page, digest in named.items() if page not in (pages or [])}
        elif kind == "release" and held:
            pool.release(held.pop(number % len(held)))
        elif kind == "publish" and held:
            page = held[number % len(held)][-1]
            if page not in named and pool.publish(page, bytes([number])):
                named[page] = bytes([number])
        elif kind == "share" and (found := pool.find(bytes([number]))) is not None:
            pool.share(found)
            held.append([found])
        pool.check()
        assert all(pool.find(digest) == page for page, digest in named.items())
        owners = [page for pages in held for page in pages]
        assert pool.owners() == {page: owners.count(page) for page in owners}
        counts = pool.counts()
        assert counts.free + counts.cached + counts.owned == counts.total == 6


def test_forget_cached_frees_what_nobody_owns() -> None:
    pool = PagePool(9, 4)
    kept, cached, plain = [pool.acquire(2) or [] for _ in range(3)]
    for page in (*kept, *cached):
        pool.publish(page, bytes([page]))
    pool.release(cached)
    pool.release(plain)
    pool.forget_cached()
    pool.check()
    assert (pool.counts().free, pool.counts().cached, pool.counts().owned) == (6, 0, 2)
    assert [pool.find(bytes([page])) for page in (*kept, *cached)] == [*kept, None, None]
