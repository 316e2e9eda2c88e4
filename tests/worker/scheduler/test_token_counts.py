"""Token counts that are updated from step to step equal the counts of the whole text."""

import random
import sys
from collections import Counter

import pytest

from worker.scheduler.sequence import LogitsProcessing, TokenCounts


def as_dict(counts: TokenCounts) -> dict[int, int]:
    found = dict(zip(counts.ids, counts.counts, strict=True))
    assert len(found) == len(counts.ids)
    return found


def expected(prompt: list[int], output: list[int]) -> dict[int, int]:
    counted = Counter(output)
    return {token: counted[token] for token in {*prompt, *output}}


@pytest.mark.parametrize("prompt_len", [1, 30, 60])
def test_counts_before_of_a_growing_output_equal_a_new_count(prompt_len: int) -> None:
    """With 60 tokens and a shorter prompt, the sequence is a resumed sequence."""
    rng = random.Random(prompt_len)
    tokens = [rng.randrange(20) for _ in range(60)]
    one = LogitsProcessing(sys.maxsize)
    for grown in (0, 1, 1, 0, 3, 1):
        tokens += [rng.randrange(25) for _ in range(grown)]
        counts = one.counts_before(tokens, prompt_len)
        assert as_dict(counts) == expected(tokens[:prompt_len], tokens[prompt_len:])


def test_counts_before_a_row_have_the_drafts_before_it_whether_or_not_they_were_accepted() -> None:
    rng = random.Random(3)
    tokens, one = [5, 6, 5], LogitsProcessing(sys.maxsize)
    for _ in range(200):
        drafts = tuple(rng.randrange(12) for _ in range(rng.randrange(5)))
        rows = range(len(drafts) + 1) if rng.random() < 0.8 else rng.sample(range(len(drafts) + 1), len(drafts) + 1)
        for at in rows:
            counts, fresh = one.counts_before(tokens, 3, drafts[:at]), LogitsProcessing(sys.maxsize)
            assert as_dict(counts) == expected(tokens[:3], [*tokens[3:], *drafts[:at]])
            assert list(counts.ids) == list(fresh.counts_before([*tokens, *drafts[:at]], 3).ids), "in the same order"
        tokens += [*drafts[: rng.randrange(5)], rng.randrange(12)]
