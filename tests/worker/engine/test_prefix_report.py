"""A frontend that gets every report of a worker's prefix cache knows exactly which prefixes it holds; a frontend that
missed reports knows them again after a sweep."""

import random

import pytest

from frontend.workers.routing import ReportedPrefixes
from shared.prefix_identity import PREFIX_LENGTHS, prefix_keys
from shared.wire import encode, pack_u32, unpack_u32
from tests.worker.scheduler.harness import Rig
from worker.engine import prefix_report
from worker.engine.prefix_report import PrefixReport
from worker.scheduler.paging import Paging
from worker.scheduler.sequence import PrefixState, Sequence

PAGE = 16


def reported(pages: int = 60) -> tuple[Rig, Paging, PrefixReport]:
    rig = Rig(pages=pages, page_size=PAGE, max_batch_size=1, max_seq_len=1000)
    state = rig.scheduler.state
    return rig, state.paging, PrefixReport.of(state.paging, state.live)


def computed(paging: Paging, sequence: Sequence) -> None:
    """Gives the sequence pages, publishes all full pages as if they were computed, and releases them."""
    assert paging.claim(sequence, alone=True)
    sequence.prefix.cached_tokens = sequence.computed_tokens
    paging.publish(sequence, sequence.computed_tokens, len(sequence.tokens))
    paging.free(sequence)


def findable(paging: Paging, prompts: list[list[int]]) -> set[int]:
    """Returns the keys of those prefixes of the prompts that the prefix cache has."""
    assert paging.prefix is not None
    found = set[int]()
    for prompt in prompts:
        digests = list[bytes]()
        paging.prefix.extend(digests, prompt, "", len(prompt) // PAGE)
        for length, key in zip(PREFIX_LENGTHS, prefix_keys(pack_u32(prompt), ""), strict=False):
            if paging.pools[0].find(digests[length // PAGE - 1]) is not None:
                found.add(key)
    return found


@pytest.mark.parametrize("lost", [0.0, 0.3])
def test_frontend_knows_what_the_cache_finds_under_random_use(lost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_report, "PART", 3)
    drawn, prompts, frontend, sizes = random.Random(7), list[list[int]](), ReportedPrefixes(), set[int]()
    rig, paging, report = reported(pages=90)
    for turn in range(300):
        prompts.append([drawn.randrange(6)] * drawn.randrange(20, 300) + [drawn.randrange(9)] * drawn.randrange(200))
        computed(paging, rig.sequence(prompts[-1]))
        if turn % 97 == 96:
            paging.clear_prefixes()
        sent = report.take()
        if drawn.random() >= lost:
            frontend.take("w", sent)
        if lost and turn % 30 == 0:
            for _ in range(2 * len(report._reported) // 3 + 2):
                frontend.take("w", report.take())
        if not lost or turn % 30 == 0:
            known = findable(paging, prompts)
            sizes.add(len(known))
            assert frontend._workers["w"].keys == known == set(frontend._holders)
    assert len(sizes) > 2 and max(sizes) > 6


def test_the_least_recently_used_prefixes_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_report, "MAX_KEYS", 2)
    rig, paging, report = reported()
    old, used, new = ([token] * 70 for token in range(3))
    for prompt in (used, old, [*used, 5, 5, 5], new):
        computed(paging, rig.sequence(prompt))
    assert set(report._keys.values()) == {prefix_keys(pack_u32(prompt), "")[0] for prompt in (used, new)}
    said = report.take()
    assert len(unpack_u32(said.came)) == 2
    assert said.went == pack_u32(prefix_keys(pack_u32(old), "")), "a frontend that sent it there hears that it is gone"


def test_prefixes_of_a_salt_have_other_keys_and_those_with_images_are_not_told() -> None:
    rig, paging, report = reported()
    salted, seen = rig.sequence([1] * 70), rig.sequence([2] * 70)
    salted.prefix, seen.prefix = PrefixState("secret"), PrefixState(mark=lambda begin, end: b"image")
    computed(paging, salted)
    computed(paging, seen)
    said, prompt = report.take(), pack_u32([1] * 70)
    assert unpack_u32(said.came).tolist() == prefix_keys(prompt, "secret") != prefix_keys(prompt, "")
    assert b"secret" not in encode(said)


def test_sequence_that_runs_while_the_cache_is_cleared_is_not_told() -> None:
    rig, paging, report = reported()
    early = rig.sequence([1] * 300)
    assert paging.claim(early, alone=True)
    paging.publish(early, 0, 64)
    paging.clear_prefixes()
    paging.publish(early, 64, 256)
    assert not report._keys and not report.take().came


def test_a_report_has_a_bound() -> None:
    rig, paging, report = reported(pages=10_000)
    for token in range(1500):
        computed(paging, rig.sequence([token] * 64))
    sizes = [len(encode(report.take())) for _ in range(30)]
    assert max(sizes) < 4 * (prefix_report.MAX_CHANGES + prefix_report.PART) + 40
    assert (
        len(report._keys) == len(report._reported) == prefix_report.MAX_KEYS and sizes[-1] < 4 * prefix_report.PART + 40
    )


def test_report_estimates_what_waiting_sequences_will_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_report, "SAMPLE", 3)
    rig, _, report = reported(pages=200)
    rig.submit([1] * 300)
    rig.finish(100)
    for tail in range(4):
        rig.submit([1] * 280 + [tail] * 20)
    rig.submit([2] * 300)
    assert report.take().saved_tokens == 5 * 256, "three of them stand for all five"
    rig.finish(100)
    assert report.take().saved_tokens == 0


def keys_of(prompt: list[int]) -> set[int]:
    return set(prefix_keys(pack_u32(prompt), ""))


def test_prefix_of_a_prompt_is_told_from_when_it_waits_until_it_is_evicted() -> None:
    rig, paging, report = reported()
    prompt = [3] * 300
    rig.submit(prompt, max_tokens=3)
    assert set(unpack_u32(report.take().came)) == keys_of(prompt), "nothing is computed yet"
    rig.finish(100)
    said = report.take()
    assert not said.came and not said.went, "the pages are there now"
    paging.clear_prefixes()
    assert set(unpack_u32(report.take().went)) == keys_of(prompt)


def test_prefix_of_a_prompt_that_leaves_early_goes_unless_another_one_begins_with_it() -> None:
    rig, _, report = reported()
    first, second = rig.submit([3] * 300), rig.submit([3] * 70)
    assert set(unpack_u32(report.take().came)) == keys_of([3] * 300)
    rig.scheduler.abort(first.key)
    assert set(unpack_u32(report.take().went)) == keys_of([3] * 300) - keys_of([3] * 70)
    rig.scheduler.abort(second.key)
    assert set(unpack_u32(report.take().went)) == keys_of([3] * 70)


def test_prompts_that_wait_have_a_bound_and_are_told_when_others_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_report, "MAX_EXPECTED", 3)
    rig, _, report = reported(pages=200)
    prompts = [rig.submit([token] * 70, max_tokens=3) for token in range(5)]
    assert len(unpack_u32(report.take().came)) == 3
    for one in prompts[:3]:
        rig.scheduler.abort(one.key)
    said = report.take()
    assert len(unpack_u32(said.went)) == 3 and len(unpack_u32(said.came)) == 2
