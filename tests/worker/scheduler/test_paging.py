"""Pages of sequences: claims, refusals, and prefixes shared through the cache."""

import pytest

from tests.worker.scheduler.harness import Rig, commit
from worker.kv_cache import pages as pages_module
from worker.kv_cache.pages import PagePool, chunk_pages, window_pages
from worker.scheduler.paging import Paging
from worker.scheduler.sequence import PromptScores, Sequence

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]  # two and a half pages of 4
THREE_PAGES = list(range(12))


def test_claim_refused_takes_nothing_and_is_repeated_only_after_pages_were_freed() -> None:
    rig, paging = Rig(), Paging([PagePool(6, 4)], prefix_cache=True, watermark=0.0, chunk=64)
    other, late = rig.sequence(12), rig.sequence(THREE_PAGES)
    assert paging.claim(other, alone=True) and not paging.claim(late, alone=False)
    assert not late.pages and paging.pools[0].available == 2 and paging.prefix and paging.prefix.queries == 12
    late.tokens = late.tokens[:5]  # the prompt would fit now, if the scheduler looked
    assert not paging.claim(late, alone=False)
    paging.free(other)
    assert paging.claim(late, alone=True) and len(late.pages[0]) == 2
    paging.check([late])


def test_claim_granted_forgets_the_refusal() -> None:
    rig, paging = Rig(), Paging([PagePool(5, 4)], prefix_cache=True, watermark=0.0, chunk=64)
    other, twin, late = rig.sequence(8), rig.sequence(THREE_PAGES), rig.sequence(THREE_PAGES)
    assert paging.claim(other, alone=True) and not paging.claim(late, alone=False)
    paging.free(other)
    assert paging.claim(late, alone=True)
    paging.free(late)
    assert paging.claim(twin, alone=True)
    paging.publish(twin, 0, 12)
    assert paging.pools[0].available == 1, "less than when it was refused, but now two of its pages are shared"
    assert paging.claim(late, alone=False) and late.pages[0][:2] == twin.pages[0][:2] and late.computed_tokens == 8
    paging.check([twin, late])


def test_claim_counts_revived_cached_pages_against_the_watermark() -> None:
    rig, paging = Rig(), Paging([PagePool(5, 4)], prefix_cache=True, watermark=0.25, chunk=64)
    first, again = rig.sequence(THREE_PAGES), rig.sequence([*THREE_PAGES, 1])
    assert paging.claim(first, alone=True)
    paging.publish(first, 0, 12)
    paging.free(first)
    assert not paging.claim(again, alone=False), "three cached and a fresh one leave no watermark"
    assert paging.pools[0].counts().cached == 3
    assert paging.claim(rig.sequence([*THREE_PAGES, 1]), alone=True)


def test_claim_equal_prompt_shares_its_full_pages() -> None:
    rig = Rig()
    a, b = rig.submit(PROMPT), None
    rig.step()
    b = rig.submit(PROMPT)
    plan = rig.plan()
    assert [(chunk.sequence, chunk.start, chunk.length) for chunk in plan.chunks] == [(a, 10, 1), (b, 8, 2)]
    assert a.pages[0][:2] == b.pages[0][:2] and a.pages[0][2] != b.pages[0][2]
    assert (b.prefix.cached_tokens, rig.scheduler.status.prefix_queries, rig.scheduler.status.prefix_hits) == (8, 20, 8)
    rig.finish(40)
    assert a.tokens == b.tokens


def test_claim_fully_cached_prompt_still_computes_its_last_token() -> None:
    rig = Rig()
    rig.submit(PROMPT[:8], max_tokens=2)
    rig.finish(5)
    b = rig.submit(PROMPT[:8], max_tokens=2)
    assert [(chunk.start, chunk.length) for chunk in rig.plan().chunks] == [(4, 4)]
    assert b.prefix.cached_tokens == 4


def test_claim_next_chat_turn_finds_the_answer_too() -> None:
    rig = Rig()
    a = rig.submit(PROMPT, max_tokens=12)
    rig.finish(40)
    b = rig.submit([*a.tokens, 8, 8], max_tokens=1)
    rig.plan()
    assert b.prefix.cached_tokens == 20, "of 22 tokens, the last without K/V"


def test_publish_happens_only_after_the_step_was_updated() -> None:
    rig = Rig(max_batch_size=1)
    a, b = rig.submit(PROMPT), rig.submit(PROMPT)
    rig.plan()
    rig.scheduler.abort(a.key)
    assert rig.pool.counts().cached == 0
    rig.plan()
    assert b.prefix.cached_tokens == 0


def test_claim_with_another_cache_salt_shares_nothing() -> None:
    rig = Rig()
    rig.submit(PROMPT, cache_salt="one")
    rig.finish(40)
    b = rig.submit(PROMPT, cache_salt="two")
    rig.plan()
    assert b.prefix.cached_tokens == 0


def computed_by(rig: Rig, sequence: Sequence) -> int:
    """Runs a sequence to its end. Returns the number of its tokens that were computed."""
    total = 0
    while sequence not in rig.ends:
        plan = rig.plan()
        total += sum(chunk.length for chunk in plan.chunks if chunk.sequence is sequence)
        rig.commit(plan, rig.run(plan))
    return total


def test_claim_with_prompt_logprobs_computes_the_whole_prompt() -> None:
    rig = Rig()
    rig.submit(PROMPT)
    rig.finish(40)
    b = rig.submit(PROMPT, prompt_logprobs=True)
    assert computed_by(rig, b) == len(PROMPT) + 7


def test_claim_without_prefix_cache_shares_nothing() -> None:
    rig = Rig(prefix_cache=False)
    for _ in range(2):
        rig.submit(PROMPT)
        rig.finish(40)
    assert rig.scheduler.status.prefix_queries == 0 and rig.pool.counts().cached == 0
    assert rig.scheduler.status.prefill_tokens == 20


def test_claim_takes_what_is_before_the_scored_tokens_from_the_cache() -> None:
    rig = Rig()
    rig.submit(PROMPT)
    rig.finish(40)
    for start, cached in ((1, 0), (4, 0), (5, 4), (8, 4), (9, 8)):
        scored = rig.submit(PROMPT, prompt_logprobs=True)
        scored.scores = PromptScores(start)
        rig.plan()
        assert scored.prefix.cached_tokens == cached, "whole pages up to the row before the first scored token"
        rig.finish(40)


def test_cached_tokens_count_earlier_output() -> None:
    rig = Rig()
    first = rig.submit(PROMPT, max_tokens=12)
    rig.finish(40)
    goes_on = rig.submit(PROMPT, max_tokens=12, generated=tuple(first.tokens[10:21]))
    rig.plan()
    assert (goes_on.computed_tokens, goes_on.prefix.cached_tokens) == (20, 20)


# Groups of layers with a window. Here kernels read keys in blocks of KEY_BLOCK positions.

KEY_BLOCK, WINDOW = 2, 6
LONG = list(range(100, 140))  # ten pages of 4


@pytest.fixture
def windowed(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Chunks have 8 tokens. A window of 6 tokens needs at most 4 pages of 4 tokens, and 4 more pages for chunks."""
    monkeypatch.setattr(pages_module, "KEY_BLOCK", KEY_BLOCK)
    return Rig(pages=41, windows={WINDOW: 21}, prefill_chunk_size=8)


def kept(sequence: Sequence, group: int) -> list[int]:
    """Returns the indexes of a sequence's pages that have not been returned to the pool."""
    return [index for index, page in enumerate(sequence.pages[group]) if page]


def test_window_is_claimed_for_the_next_chunk_and_returned_behind(windowed: Rig) -> None:
    a = windowed.submit(LONG)
    windowed.plan()
    assert kept(a, 0) == list(range(10)) and kept(a, 1) == [0, 1, 2, 3] and a.capacity == 16
    windowed.step()  # positions 0 .. 7
    windowed.step()
    # the row at position 16 attends to 11 .. 16, and its kernel reads from 10 on: page 2
    assert a.computed_tokens == 16 and kept(a, 1) == [2, 3] and kept(a, 0) == list(range(10))
    windowed.plan()
    assert kept(a, 1) == [2, 3, 4, 5], "for the chunk 16 .. 23"
    windowed.finish(40)
    assert all(pool.counts().owned == 0 for pool in windowed.pools)


def test_step_that_is_discarded_finds_its_pages_again(windowed: Rig) -> None:
    a = windowed.submit(LONG)
    windowed.step()
    plan = windowed.plan()
    windowed.launch(plan)
    before = kept(a, 1)
    windowed.in_flight.clear()
    windowed.scheduler.discard_in_flight()
    assert kept(a, 1) == before and [(chunk.start, chunk.length) for chunk in windowed.plan().chunks] == [(8, 8)]


def test_prompt_asked_twice_hits_though_its_window_moved_on(windowed: Rig) -> None:
    windowed.submit(LONG, max_tokens=2)
    windowed.finish(20)
    pool = windowed.pools[1]
    pool.release(pool.acquire(pool.counts().free + 5) or [])  # evicts the five pages that were released first
    again = windowed.submit(LONG, max_tokens=2)
    windowed.plan()
    # the last of the 10 pages has the token to compute; the row at position 36 reads from 30 on: page 7
    assert again.prefix.cached_tokens == 36 and kept(again, 1)[:2] == [7, 8] and kept(again, 0) == list(range(10))
    windowed.finish(20)


def test_prompt_grows_only_if_its_chunk_may_be_in_the_step(windowed: Rig) -> None:
    rig = Rig(pages=81, windows={WINDOW: 41}, prefill_chunk_size=8, max_step_tokens=8)
    first, second = rig.submit(40), rig.submit(41)
    rig.step()
    rig.step()
    rig.step()
    assert first.computed_tokens == 24 and not second.pages, "the first takes the whole step"


def test_sequence_of_32k_tokens_keeps_a_window_of_512() -> None:
    """Two sequences run although the window's pages hold only 2,500 positions. Blocks of keys have their real size."""
    settings = {"prefill_chunk_size": 512, "max_step_tokens": 512, "max_seq_len": 40_000}
    size, chunk = 32, chunk_pages(512, 32)
    rig = Rig(pages=2 * 1025 + 30, page_size=size, windows={512: 2 * window_pages(512, size) + chunk + 1}, **settings)
    both = [rig.submit(32_768, max_tokens=40), rig.submit(32_768, max_tokens=40)]
    most = 0
    while rig.scheduler.has_work:
        plan = rig.scheduler.plan(0.0)
        commit(rig.scheduler, plan, [7] * len(plan.sampling), 0.0)
        rig.scheduler.check()
        windows = [len(kept(sequence, 1)) for sequence in both if sequence.pages]
        most = max(most, *windows, 0)
        if all(sequence.output_len > 1 for sequence in both) and len(windows) == 2:
            assert max(windows) <= window_pages(512, size) and rig.pools[0].counts().owned == 2 * 1025
    assert most <= window_pages(512, size) + chunk and rig.scheduler.status.preemptions == 0
