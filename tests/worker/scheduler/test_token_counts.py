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
        counts = one.counts_before(len(tokens) - prompt_len, tokens, prompt_len)
        assert as_dict(counts) == expected(tokens[:prompt_len], tokens[prompt_len:])


def test_counts_before_of_an_answer_are_of_its_first_tokens_in_any_order_of_calls() -> None:
    prompt, answer = [5, 6, 5], [6, 7, 7, 8, 5]
    one = LogitsProcessing(sys.maxsize)
    for output in (0, 1, 2, 3, 2, 4, 0, 4):
        assert as_dict(one.counts_before(output, [*prompt], 3, answer)) == expected(prompt, answer[:output])
