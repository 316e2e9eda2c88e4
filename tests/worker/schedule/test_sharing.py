"""Preemption, the prefix cache and groups: computing as little as possible, and nothing wrong."""

from tests.worker.schedule.harness import Rig
from worker.schedule.sequence import Sequence

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]  # two and a half pages of 4


def computed_by(rig: Rig, sequence: Sequence) -> int:
    """Tokens computed from here to the sequence's end."""
    total = 0
    while sequence not in rig.ends:
        plan = rig.plan()
        total += sum(chunk.length for chunk in plan.chunks if chunk.sequence is sequence)
        rig.commit(plan, rig.run(plan))
    return total


def test_the_newest_is_preempted_and_comes_back_before_those_that_never_ran() -> None:
    rig = Rig(pages=6, prefix_cache=False, watermark=0.0, max_batch_size=2)
    a, b, c = rig.submit(7, max_tokens=6), rig.submit(7, max_tokens=6), rig.submit(2)
    rig.step()
    while not b.preemptions:
        plan = rig.plan()
        rig.commit(plan, rig.run(plan))
    assert plan.preempted == [b] and [chunk.sequence for chunk in plan.chunks] == [a]
    assert (b.computed_tokens, b.pages.tolist(), rig.scheduler.status.preemptions) == (0, [], 1)
    had = list(b.tokens)
    assert len(had) > 7 and rig.scheduler.status.waiting_tokens == len(had) + 2
    rig.finish(100)
    assert list(rig.ends) == [a, b, c] and b.tokens[: len(had)] == had


def test_of_several_preempted_the_older_comes_back_first() -> None:
    rig = Rig(pages=7, page_size=3, prefix_cache=False, watermark=0.0)
    a, b, c = rig.submit(6, max_tokens=12), rig.submit(6, max_tokens=9), rig.submit(5, max_tokens=9)
    admitted: list[Sequence] = []
    while rig.scheduler.has_work:
        plan = rig.plan()
        admitted += [chunk.sequence for chunk in plan.chunks if chunk.start == 0]
        rig.commit(plan, rig.run(plan))
    assert a.preemptions == 0 and b.preemptions and c.preemptions
    assert list(rig.ends) == [a, b, c]
    assert admitted[:3] == [a, b, c] and admitted.index(b, 3) < admitted.index(c, 3)


def test_a_preempted_sequence_finds_its_own_pages_again() -> None:
    rig = Rig(pages=9, watermark=0.0)
    a, b = rig.submit(12, max_tokens=10), rig.submit(12, max_tokens=10)
    rig.finish(100)
    assert b.preemptions == 1 and a.preemptions == 0
    assert rig.scheduler.status.prefix_hits > 0
    assert rig.scheduler.status.prefill_tokens < 12 + 12 + 12 + 9, "less than computing it all again"


def test_an_equal_prompt_shares_its_full_pages() -> None:
    rig = Rig()
    a, b = rig.submit(PROMPT), None
    rig.step()
    b = rig.submit(PROMPT)
    plan = rig.plan()
    assert [(chunk.sequence, chunk.start, chunk.length) for chunk in plan.chunks] == [(a, 10, 1), (b, 8, 2)]
    assert a.pages[:2] == b.pages[:2] and a.pages[2] != b.pages[2]
    assert (b.cached_tokens, rig.scheduler.status.prefix_queries, rig.scheduler.status.prefix_hits) == (8, 20, 8)
    rig.finish(40)
    assert a.tokens == b.tokens


def test_the_last_token_is_computed_even_when_all_pages_are_cached() -> None:
    rig = Rig()
    rig.submit(PROMPT[:8], max_tokens=2)
    rig.finish(5)
    b = rig.submit(PROMPT[:8], max_tokens=2)
    assert [(chunk.start, chunk.length) for chunk in rig.plan().chunks] == [(4, 4)]
    assert b.cached_tokens == 4


def test_the_next_turn_of_a_chat_finds_the_answer_too() -> None:
    rig = Rig()
    a = rig.submit(PROMPT, max_tokens=12)
    rig.finish(40)
    b = rig.submit([*a.tokens, 8, 8], max_tokens=1)
    rig.plan()
    assert b.cached_tokens == 20, "of 22 tokens, the last without K/V"


def test_pages_are_found_only_after_their_step_was_committed() -> None:
    rig = Rig(max_batch_size=1)
    a, b = rig.submit(PROMPT), rig.submit(PROMPT)
    rig.plan()
    rig.scheduler.abort(a.key)
    assert rig.pool.counts().cached == 0
    rig.plan()
    assert b.cached_tokens == 0


def test_tenants_do_not_share() -> None:
    rig = Rig()
    rig.submit(PROMPT, cache_salt="one")
    rig.finish(40)
    b = rig.submit(PROMPT, cache_salt="two")
    rig.plan()
    assert b.cached_tokens == 0


def test_prompt_logprobs_need_the_whole_prompt() -> None:
    rig = Rig()
    rig.submit(PROMPT)
    rig.finish(40)
    b = rig.submit(PROMPT, prompt_logprobs=True)
    assert computed_by(rig, b) == len(PROMPT) + 7


def test_without_prefix_cache_nothing_is_shared() -> None:
    rig = Rig(prefix_cache=False)
    for _ in range(2):
        rig.submit(PROMPT)
        rig.finish(40)
    assert rig.scheduler.status.prefix_queries == 0 and rig.pool.counts().cached == 0
    assert rig.scheduler.status.prefill_tokens == 20


def test_a_group_computes_its_prompt_once() -> None:
    rig = Rig(prefill_chunk_size=4)
    group = [rig.submit(PROMPT, group=1) for _ in range(4)]
    other = rig.submit(3)
    for _ in range(2):
        assert {chunk.sequence for chunk in rig.plan().chunks} == {group[0], other}, "others pass, siblings wait"
        rig.step()
    rig.step()
    assert rig.scheduler.status.waiting == 3
    plan = rig.plan()
    assert [chunk.sequence for chunk in plan.chunks] == [group[0], other, *group[1:]]
    assert [sequence.cached_tokens for sequence in group] == [0, 8, 8, 8]
    assert rig.scheduler.status.prefill_tokens == 10 + 3
    rig.finish(40)


def test_siblings_find_a_new_leader_when_the_first_leaves() -> None:
    rig = Rig(prefill_chunk_size=4)
    a, b, c, d = (rig.submit(PROMPT, group=1) for _ in range(4))
    rig.step()
    rig.scheduler.abort(a.key)
    rig.scheduler.abort(c.key)
    rig.scheduler.check()
    assert [chunk.sequence for chunk in rig.plan().chunks] == [b]
    rig.scheduler.fail(b)
    assert [chunk.sequence for chunk in rig.plan().chunks] == [d]
    rig.finish(40)
    assert list(rig.ends) == [d]


def test_siblings_wait_on_while_their_leader_is_preempted() -> None:
    rig = Rig(pages=8, watermark=0.0, prefill_chunk_size=2)
    a = rig.submit(8, max_tokens=16)
    rig.submit(1, max_tokens=1)
    group = [rig.submit([*PROMPT, 1, 2, 3, 4, 5], max_tokens=4, group=1) for _ in range(2)]
    while not group[0].preemptions and rig.scheduler.has_work:
        rig.step()
    assert group[0].preemptions and not group[1].pages
    rig.finish(200)
    assert rig.ends.keys() >= {a, *group} and group[1].cached_tokens > 0


def test_groups_are_told_apart_by_frontend() -> None:
    rig = Rig()
    a, b = rig.submit(PROMPT, group=1), rig.sequence(PROMPT, group=1)
    b.key = (b"another!", 1)
    rig.scheduler.submit(b, 0.0)
    assert [chunk.sequence for chunk in rig.plan().chunks] == [a, b]


def test_without_prefix_cache_siblings_do_not_wait() -> None:
    rig = Rig(prefix_cache=False)
    group = [rig.submit(PROMPT, group=1) for _ in range(3)]
    assert [chunk.sequence for chunk in rig.plan().chunks] == group


def test_cached_counts_prompt_tokens_only() -> None:
    rig = Rig()
    first = rig.submit(PROMPT, max_tokens=12)
    rig.finish(40)
    goes_on = rig.submit(PROMPT, max_tokens=12, generated=tuple(first.tokens[10:21]))
    rig.plan()
    assert (goes_on.computed_tokens, goes_on.cached_tokens) == (20, 10)
