"""The basic types of a frontend, in frontend/request.py."""

from frontend.request import Delta, TokenLogprob, Usage


def test_text_of_a_delta_joins_its_texts() -> None:
    assert Delta(0, [1, 2, 3], ["a", "", "b"]).text == "ab"


def test_total_tokens_of_a_usage_count_prompt_and_completion() -> None:
    assert Usage(3, 4, cached_tokens=2).total_tokens == 7


def test_top_of_a_token_has_the_token_itself_once() -> None:
    assert TokenLogprob(5, -3.0, ((1, -0.1), (2, -2.0))).top_with_token == ((1, -0.1), (2, -2.0), (5, -3.0))
    assert TokenLogprob(2, -2.0, ((1, -0.1), (2, -2.0))).top_with_token == ((1, -0.1), (2, -2.0))
    assert TokenLogprob(5, -3.0).top_with_token == ((5, -3.0),)
