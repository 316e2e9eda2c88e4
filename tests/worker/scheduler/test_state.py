"""The state of live sequences: how their output ends them, and preemption."""

from typing import Any

import pytest

from shared.messages import Outcome
from tests.worker.scheduler.harness import EOS, Rig, feed
from worker.scheduler.sequence import Sequence

STOP = 7
OTHER = 5


@pytest.mark.parametrize(
    ("ids", "sampling", "outcome"),
    [
        ([OTHER, EOS], {}, Outcome.EOS),
        ([OTHER, STOP], {"stop_token_ids": (STOP,)}, Outcome.STOP),
        ([OTHER, OTHER, OTHER], {"max_tokens": 3}, Outcome.LENGTH),
        ([OTHER, OTHER], {"max_tokens": 3}, None),
        ([EOS], {"stop_token_ids": (EOS,)}, Outcome.EOS),
        ([OTHER, EOS], {"max_tokens": 2}, Outcome.EOS),
        ([OTHER, STOP], {"max_tokens": 2, "stop_token_ids": (STOP,)}, Outcome.STOP),
        ([EOS, EOS, OTHER], {"ignore_eos": True, "max_tokens": 3}, Outcome.LENGTH),
        ([EOS], {"ignore_eos": True, "stop_token_ids": (EOS,)}, Outcome.STOP),
        ([EOS, STOP, EOS], {"min_tokens": 3, "stop_token_ids": (STOP,)}, Outcome.EOS),
        ([EOS, STOP], {"min_tokens": 3, "stop_token_ids": (STOP,)}, None),
        ([EOS, EOS], {"min_tokens": 5, "max_tokens": 2}, Outcome.LENGTH),
    ],
)
def test_outcome_of_output(ids: list[int], sampling: dict[str, Any], outcome: Outcome | None) -> None:
    rig = Rig(eos_token_ids=frozenset({EOS}))
    sequence = rig.submit(3, **sampling)
    assert feed(rig, sequence, ids) == outcome
    assert rig.scheduler.has_work == (outcome is None)
    assert bool(rig.pool.counts().owned) == (outcome is None), "pages are free when it has ended"


def test_outcome_at_max_seq_len_is_length() -> None:
    rig = Rig(max_seq_len=6)
    assert feed(rig, rig.submit(4, max_tokens=2), [OTHER, OTHER]) == Outcome.LENGTH


def test_preempt_takes_the_newest_which_returns_before_new_ones() -> None:
    rig = Rig(pages=6, prefix_cache=False, watermark=0.0, max_batch_size=2)
    a, b, c = rig.submit(7, max_tokens=6), rig.submit(7, max_tokens=6), rig.submit(2)
    rig.step()
    while not b.history.preemptions:
        plan = rig.plan()
        rig.commit(plan, rig.run(plan))
    assert plan.preempted == [b] and [chunk.sequence for chunk in plan.chunks] == [a]
    assert (b.computed_tokens, b.pages, rig.scheduler.status.preemptions) == (0, [], 1)
    had = list(b.tokens)
    assert len(had) > 7 and rig.scheduler.status.waiting_tokens == len(had) + 2
    rig.finish(100)
    assert list(rig.ends) == [a, b, c] and b.tokens[: len(had)] == had


def test_expected_tokens_are_those_of_prompts_that_are_not_computed_and_of_outputs() -> None:
    rig = Rig(max_batch_size=1)
    rig.submit(7, max_tokens=6)
    rig.submit(5, max_tokens=8)
    assert rig.scheduler.state.expected_tokens == (7 + 6) + (5 + 8)
    rig.step()
    assert rig.scheduler.state.expected_tokens == 5 + (5 + 8)
    rig.finish(100)
    assert rig.scheduler.state.expected_tokens == 0


def test_preempt_of_several_the_older_returns_first() -> None:
    rig = Rig(pages=7, page_size=3, prefix_cache=False, watermark=0.0)
    a, b, c = rig.submit(6, max_tokens=12), rig.submit(6, max_tokens=9), rig.submit(5, max_tokens=9)
    admitted: list[Sequence] = []
    while rig.scheduler.has_work:
        plan = rig.plan()
        admitted += [chunk.sequence for chunk in plan.chunks if chunk.start == 0]
        rig.commit(plan, rig.run(plan))
    assert a.history.preemptions == 0 and b.history.preemptions and c.history.preemptions
    assert list(rig.ends) == [a, b, c]
    assert admitted[:3] == [a, b, c] and admitted.index(b, 3) < admitted.index(c, 3)


def test_preempted_sequence_finds_its_pages_again() -> None:
    rig = Rig(pages=9, watermark=0.0)
    a, b = rig.submit(12, max_tokens=10), rig.submit(12, max_tokens=10)
    rig.finish(100)
    assert b.history.preemptions == 1 and a.history.preemptions == 0
    assert rig.scheduler.status.prefix_hits > 0
    assert rig.scheduler.status.prefill_tokens < 12 + 12 + 12 + 9, "less than computing it all again"
