"""The images of a prompt change the hashes of pages, and limit where chunks may end."""

import random
from itertools import pairwise
from math import inf

import pytest

from shared.messages import PromptImage, Sampling
from tests.worker.scheduler.harness import commit
from worker.engine.loop import first_half
from worker.kv_cache.pages import PagePool
from worker.kv_cache.prefix_cache import PrefixCache
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.prompt_images import PromptImages
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Chunk, Sequence

PAGE = 4
PLACES = [(5, 6), (11, 3), (20, 10)]  # (start, tokens) of three images; no text lies between the first two


def images_at(places: list[tuple[int, int]], digest: bytes = b"d" * 32, *, whole: bool = True) -> PromptImages:
    return PromptImages([PromptImage(start, tokens, 1, 1, b"abc", digest) for start, tokens in places], whole=whole)


def sequence_of(id: int, length: int, images: PromptImages | None, prompt: int = 0) -> Sequence:
    tokens = list(range(3, length + 3))
    sequence = Sequence((b"f", id), tokens, prompt or length, Sampling(4, ignore_eos=True), 0, images=images)
    sequence.prefix.mark = None if images is None else images.places.mark
    return sequence


def test_pages_are_hashed_with_the_images_that_begin_in_them() -> None:
    cache, tokens = PrefixCache([PagePool(9, PAGE)]), list(range(32))

    def digests(images: PromptImages | None) -> list[bytes]:
        found: list[bytes] = []
        cache.extend(found, tokens, "", 8, None if images is None else images.places.mark)
        return found

    plain, seeing = digests(None), digests(images_at(PLACES))
    assert seeing[0] == plain[0] and all(a != b for a, b in zip(seeing[1:], plain[1:], strict=True))
    assert digests(images_at(PLACES)) == seeing
    for changed in (
        images_at(PLACES, b"e" * 32), images_at([(5, 5), *PLACES[1:]]), images_at([(6, 6), *PLACES[1:]]),
        images_at(PLACES[:1]), images_at(PLACES[1:]),
    ):  # fmt: skip
        first = next(index for index, pair in enumerate(zip(digests(changed), seeing, strict=True)) if len({*pair}) > 1)
        assert first == (2 if changed.places.places == images_at(PLACES[:1]).places.places else 1)
    last = images_at([*PLACES[:2], (20, 9)])
    assert digests(last)[:5] == seeing[:5] and digests(last)[5] != seeing[5]


def test_images_within_a_range() -> None:
    images = images_at(PLACES)
    for begin in range(35):
        for end in range(begin + 1, 36):
            expected = [start for start, tokens in PLACES if start < end and begin < start + tokens]
            assert [one.start for one in images.within(begin, end)] == expected


def test_chunks_end_at_no_place_within_an_image() -> None:
    images = images_at(PLACES)
    inside = {at for start, tokens in PLACES for at in range(start + 1, start + tokens)}
    for start in range(40):
        for length in range(41 - start):
            found = images.uncut(start, length, inf)
            assert start + found not in inside or not found
            assert (found > 0) == (length > 0)
            assert found <= length or start + length in inside, "longer only to hold the rest of an image"
            assert images.uncut(start, length, 2) in (found, 0)
            assert images_at(PLACES, whole=False).uncut(start, length, 2) == length
    assert images.uncut(20, 3, 9) == 0 and images.uncut(20, 3, 10) == 10 and images.uncut(24, 3, 6) == 6


@pytest.mark.parametrize("seed", range(6))
def test_steps_never_cut_an_image_whatever_their_budget(seed: int) -> None:
    draw = random.Random(seed)
    config = SchedulerConfig(
        max_seq_len=256, max_step_tokens=draw.choice((8, 16, 64)), prefill_chunk_size=draw.choice((3, 12, 64)),
        scheduler_policy=draw.choice(("fcfs", "prefill_first", "decode_round_robin")), prefix_cache=draw.random() < 0.7,
        use_chunked_prefill=draw.random() < 0.8, max_prefill_chunks_per_step=draw.choice((0, 1)),
    )  # fmt: skip
    scheduler = Scheduler(config, [PagePool(60, PAGE)])
    sequences = []
    for id in range(8):
        places = PLACES if id % 2 else [(0, 30), (40, 2)]
        sequences.append(sequence_of(id, 50 + id, images_at(places) if id % 3 else None))
        scheduler.submit(sequences[-1], 0.0)
    steps = 0
    while scheduler.has_work:
        plan = scheduler.plan(float(steps))
        assert plan, "every step computes something"
        for chunk in plan.chunks:
            for one in chunk.sequence.images.images if chunk.sequence.images is not None else ():
                end = chunk.start + chunk.length
                assert not one.start < end < one.start + one.tokens, (chunk, one)
        commit(scheduler, plan, [draw.randrange(3, 99) for _ in plan.rows], float(steps))
        if draw.random() < 0.1 and scheduler.state.running:
            scheduler.state.preempt(next(reversed(scheduler.state.running)), float(steps))
        steps += 1
        assert steps < 2000
    scheduler.check()
    assert all(one.output_len == 4 for one in sequences)


def test_chunk_that_is_halved_for_lack_of_memory_cuts_no_image() -> None:
    sequence = sequence_of(0, 40, images_at(PLACES))
    cut, chunk = [], Chunk(sequence, 0, 40, True)
    while (half := first_half(chunk)) is not None:
        cut.append((chunk := half).length)
    assert cut == [20, 5, 2, 1], "10 would be within the first image"
    assert first_half(Chunk(sequence, 20, 10, False)) is None
    rest = first_half(Chunk(sequence, 20, 20, True))
    assert rest is not None and rest.length == 10
    assert all(a > b for a, b in pairwise(cut))
