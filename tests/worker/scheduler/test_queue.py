"""The waiting queue: in a group of sequences of one prompt, all others wait for the first."""

from tests.worker.scheduler.harness import Rig, join_order

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]  # two and a half pages of 4


def test_group_computes_its_prompt_once() -> None:
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
    assert [sequence.prefix.cached_tokens for sequence in group] == [0, 8, 8, 8]
    assert rig.scheduler.status.prefill_tokens == 10 + 3
    rig.finish(40)


def test_group_whose_leader_leaves_follows_the_next_member() -> None:
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


def test_group_whose_leader_is_preempted_waits_on() -> None:
    rig = Rig(pages=8, watermark=0.0, prefill_chunk_size=2)
    a = rig.submit(8, max_tokens=16)
    rig.submit(1, max_tokens=1)
    group = [rig.submit([*PROMPT, 1, 2, 3, 4, 5], max_tokens=4, group=1) for _ in range(2)]
    while not group[0].history.preemptions and rig.scheduler.has_work:
        rig.step()
    assert group[0].history.preemptions and not group[1].pages
    rig.finish(200)
    assert rig.ends.keys() >= {a, *group} and group[1].prefix.cached_tokens > 0


def test_groups_of_different_frontends_are_separate() -> None:
    rig = Rig()
    a, b = rig.submit(PROMPT, group=1), rig.sequence(PROMPT, group=1)
    b.key = (b"another!", 1)
    rig.scheduler.submit(b, 0.0)
    rig.plan()
    assert list(rig.scheduler.state.running) == [a, b]


def test_group_without_prefix_cache_does_not_wait() -> None:
    rig = Rig(prefix_cache=False)
    group = [rig.submit(PROMPT, group=1) for _ in range(3)]
    assert [chunk.sequence for chunk in rig.plan().chunks] == group


def test_group_followers_share_fairly_with_another_tenant() -> None:
    rig = Rig(max_batch_size=2)
    group = [rig.submit([3, 1, 4, 1, 5, 9, 2, 6, 5], max_tokens=3, group=1, tenant="a") for _ in range(3)]
    others = [rig.submit(9, max_tokens=3, tenant="b") for _ in range(2)]
    after = rig.submit(9, max_tokens=3, tenant="a")
    assert join_order(rig)[:2] == [group[0], others[0]]
    assert set(rig.ends) == {*group, *others, after}


def test_group_followers_go_before_later_requests() -> None:
    rig = Rig(max_batch_size=1)
    group = [rig.submit([3, 1, 4, 1, 5, 9, 2, 6, 5], max_tokens=3, group=1) for _ in range(3)]
    other = rig.submit(9, max_tokens=3)
    assert join_order(rig) == [*group, other]
