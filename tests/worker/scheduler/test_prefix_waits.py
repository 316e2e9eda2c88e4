"""The prefix of prompts that arrive together is computed once, and each prompt gets its own output."""

from typing import Any

import pytest

from tests.worker.scheduler.harness import Rig, shape
from worker.kv_cache import pages as pages_module
from worker.scheduler.sequence import Sequence

SHARED = [*range(1, 11)] * 3  # 30 tokens: 7 full pages of 4


def together(rig: Rig, tails: int, **options: Any) -> list[Sequence]:
    return [rig.submit([*SHARED, 20 + tail, 30 + tail], max_tokens=3, **options) for tail in range(tails)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [6, 512])
@pytest.mark.parametrize(
    "more", [{}, {"windows": {8: 65}}, {"slots": 80, "state_checkpoint_tokens": 8}], ids=["plain", "window", "states"]
)
def test_prefix_of_prompts_that_arrive_together_is_computed_once(
    more: dict[str, Any], chunk: int, overlap: bool
) -> None:
    rig = Rig(pages=200, overlap=overlap, prefill_chunk_size=chunk, **more)
    prompts = together(rig, 5)
    rig.finish(60)
    rig.finish_steps()
    assert set(rig.ends) == set(prompts)
    status = rig.scheduler.status
    assert status.prefill_tokens == 32 + 4 * 4
    assert status.prefix_queries == 5 * 32 and status.prefix_hits == sum(one.prefix.cached_tokens for one in prompts)
    assert [one.prefix.cached_tokens for one in prompts] == [0, *[28] * 4]


def test_prompts_of_another_salt_or_prefix_do_not_wait() -> None:
    rig = Rig(pages=200)
    first = together(rig, 1)[0]
    others = [*together(rig, 1, cache_salt="other"), rig.submit([*SHARED[1:], 1], max_tokens=3)]
    assert [chunk.sequence for chunk in rig.plan().chunks] == [first, *others]


def test_short_prompts_without_a_full_page_do_not_wait() -> None:
    rig = Rig(pages=200)
    both = [rig.submit([1, 2, 3, 4], max_tokens=2) for _ in range(2)]
    assert [chunk.sequence for chunk in rig.plan().chunks] == both


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_prompt_goes_on_when_the_one_it_waits_for_is_gone(steps: int) -> None:
    rig = Rig(pages=200, prefill_chunk_size=6, overlap=True)
    first, second = together(rig, 2)
    for _ in range(steps):
        rig.step()
    rig.scheduler.abort(first.key)
    rig.finish(60)
    rig.finish_steps()
    assert set(rig.ends) == {second}
    assert second.prefix.cached_tokens <= 6 * steps


def test_a_prompt_waits_no_longer_than_the_shared_pages_need() -> None:
    rig = Rig(pages=200, prefill_chunk_size=8, max_seq_len=200)
    first = rig.submit([*SHARED, *[40] * 100], max_tokens=3)
    second = together(rig, 1)[0]
    while not second.output_len:
        rig.step()
    assert first.computed_tokens <= 6 * 8, "it waited for pages that it does not share"


def test_a_window_without_room_for_the_longer_prefix_leaves_the_prompt_its_own_pages() -> None:
    rig = Rig(pages=200, windows={12: 15}, prefill_chunk_size=8, watermark=0.0)
    prompts = together(rig, 4)
    rig.finish(200)
    assert set(rig.ends) == set(prompts)


def test_requests_after_a_failed_step_wait_again() -> None:
    rig = Rig(pages=200)
    prompts = together(rig, 3)
    plan = rig.plan()
    rig.scheduler.launched(plan)
    rig.scheduler.discard_in_flight()
    assert [chunk.sequence for chunk in rig.plan().chunks] == prompts[:1]
    rig.finish(60)
    assert set(rig.ends) == set(prompts)


def test_prompt_gets_pages_for_what_a_waiting_prompt_leaves_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "KEY_BLOCK", 1)
    rig = Rig(pages=200, windows={8: 60}, max_step_tokens=32, prefill_chunk_size=16)
    prompt = list(range(100, 148))
    for tokens in (prompt, [*prompt, 1], [200] * 48):  # the second one waits for the pages of the first
        rig.submit(tokens, 2)
    rig.step()
    assert [length for *_, length in shape(rig.plan())] == [16, 16]
    rig.finish(100)
