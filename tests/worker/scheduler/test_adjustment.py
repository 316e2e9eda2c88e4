"""Which requests need adjusted logits, and for how many tokens."""

from typing import Any

import pytest

from shared.messages import Sampling
from worker.scheduler.sequence import logits_processing


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0, "top_k": 3}, {"grammar": "x"}, {"bad_words": ((1,),)}])
def test_adjustment_of_plain_sampling_is_none(options: dict[str, Any]) -> None:
    assert logits_processing(Sampling(9, **options), 5) is None


@pytest.mark.parametrize(
    "options", [{"presence_penalty": 0.1}, {"repetition_penalty": 1.1}, {"logit_bias": ((1, 2.0),)}]
)
def test_adjustment_by_a_penalty_or_a_bias_never_ends(options: dict[str, Any]) -> None:
    adjusted = logits_processing(Sampling(9, min_tokens=3, **options), 5)
    assert adjusted is not None and adjusted.until > 1 << 32


def test_adjustment_by_min_tokens_ends_with_them() -> None:
    adjusted = logits_processing(Sampling(9, min_tokens=3), 5)
    assert adjusted is not None and adjusted.until == 8
