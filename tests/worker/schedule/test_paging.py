"""Claims: what a sequence needs, what it may take, and when asking again is worth a look."""

from tests.worker.schedule.harness import Rig
from worker.kv_cache.pages import PagePool
from worker.schedule.paging import Paging

PROMPT = list(range(12))  # three pages of 4


def test_a_refused_claim_takes_nothing_and_is_looked_up_again_only_when_pages_came_free() -> None:
    rig, paging = Rig(), Paging(PagePool(6, 4), prefix_cache=True, watermark=0.0)
    other, late = rig.sequence(12), rig.sequence(PROMPT)
    assert paging.claim(other, alone=True) and not paging.claim(late, alone=False)
    assert not late.pages and paging.pool.available == 2 and paging.prefix and paging.prefix.queries == 12
    late.tokens = late.tokens[:5]  # would fit, if anybody looked
    assert not paging.claim(late, alone=False)
    paging.free(other)
    assert paging.claim(late, alone=True) and len(late.pages) == 2
    paging.check([late])


def test_a_refusal_is_forgotten_once_the_claim_was_granted() -> None:
    rig, paging = Rig(), Paging(PagePool(5, 4), prefix_cache=True, watermark=0.0)
    other, twin, late = rig.sequence(8), rig.sequence(PROMPT), rig.sequence(PROMPT)
    assert paging.claim(other, alone=True) and not paging.claim(late, alone=False)
    paging.free(other)
    assert paging.claim(late, alone=True)
    paging.free(late)
    assert paging.claim(twin, alone=True)
    paging.publish(twin, 0, 12)
    assert paging.pool.available == 1, "less than when it was refused, but now two of its pages are shared"
    assert paging.claim(late, alone=False) and late.pages[:2] == twin.pages[:2] and late.computed_tokens == 8
    paging.check([twin, late])


def test_cached_pages_of_nobody_count_as_taken() -> None:
    rig, paging = Rig(), Paging(PagePool(5, 4), prefix_cache=True, watermark=0.25)
    first, again = rig.sequence(PROMPT), rig.sequence([*PROMPT, 1])
    assert paging.claim(first, alone=True)
    paging.publish(first, 0, 12)
    paging.free(first)
    assert not paging.claim(again, alone=False), "three cached and a fresh one leave no watermark"
    assert paging.pool.counts().cached == 3
    assert paging.claim(rig.sequence([*PROMPT, 1]), alone=True)
