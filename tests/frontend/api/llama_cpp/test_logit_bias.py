"""Logit biases by token id and by text."""

from typing import Any

import pytest

from frontend.api.llama_cpp import options
from frontend.api.llama_cpp.options import MOST_BIAS
from frontend.errors import Unprocessable
from frontend.schema.base import FieldError
from frontend.text.tokenizer import Tokenizer
from tests.fakes import context


@pytest.mark.parametrize(
    ("biases", "added", "forbidden"),
    [
        ([[64, 1.5], ["bc", -2]], {64: 1.5, 65: -2.0, 66: -2.0}, []),
        ({"64": 1.5, "bc": -2}, {64: 1.5, 65: -2.0, 66: -2.0}, []),
        ([[64, False], ["b", 1]], {65: 1.0}, [64]),
        ({"ab": False, "64": 3}, {64: 3.0}, [65]),
        ([[11, -1000], [12, 1e300], ["b", -(10**400)]], {11: -1000.0, 12: MOST_BIAS, 65: -MOST_BIAS}, []),
        ({"11": -1e6}, {11: -1e6}, []),
        ([], {}, []),
        (None, {}, []),
    ],
)
async def test_texts_stand_for_their_tokens_and_later_entries_replace_earlier_ones(
    tokenizer: Tokenizer, biases: Any, added: dict[int, float], forbidden: list[int]
) -> None:
    options.check_logit_bias(biases)
    found = await options.logit_bias_by_token(biases, context(tokenizer))
    assert (found.added, found.forbidden) == (added, forbidden)


@pytest.mark.parametrize(
    "biases",
    [[[1]], [[1, 2, 3]], [[-1, 1]], [[1.5, 1]], [[True, 1]], [[1, True]], {"a": "b"}, [["a", "b"]]],
)
def test_entries_that_are_no_pairs_are_refused(biases: Any) -> None:
    with pytest.raises(FieldError, match="`logit_bias` must"):
        options.check_logit_bias(biases)


def test_too_many_entries_are_refused() -> None:
    with pytest.raises(FieldError, match="at most"):
        options.check_logit_bias({str(id): 1.0 for id in range(5000)})


async def test_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(Unprocessable, match="`logit_bias`"):
        await options.logit_bias_by_token([[999, 1.0]], context(tokenizer))
