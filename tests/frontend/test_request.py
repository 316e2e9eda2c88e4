"""The frontend's vocabulary."""

from frontend.request import Delta, Usage


def test_text_of_a_delta_joins_its_texts() -> None:
    assert Delta(0, [1, 2, 3], ["a", "", "b"]).text == "ab"


def test_total_tokens_of_a_usage_count_prompt_and_completion() -> None:
    assert Usage(3, 4, cached_tokens=2).total_tokens == 7
