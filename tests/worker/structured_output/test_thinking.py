"""Budgets for reasoning. Id 7 opens reasoning, 8 closes it, 5 is a blank."""

import pytest

from shared.messages import ThinkingBudget
from worker.structured_output.matcher import Thinking

OPEN, CLOSE, BLANK = 7, 8, 5


def after(*output: int, tokens: int = 2, begun: bool = False, blanks: tuple[int, ...] | None = (BLANK,)) -> Thinking:
    thinking = Thinking(ThinkingBudget(tokens, (OPEN,), CLOSE, (CLOSE, 9), begun, blanks))
    for count in range(1, len(output) + 1):
        thinking.accept(output[:count])
    return thinking


@pytest.mark.parametrize("output", [(OPEN, 1, 2), (BLANK, OPEN, 1, 2)])
def test_reasoning_that_used_its_budget_up_is_closed(output: tuple[int, ...]) -> None:
    assert after(*output[:-1]).due == () and after(*output).due == (CLOSE, 9)
    assert after(*output, CLOSE).due == (9,) and not after(*output, CLOSE).over
    assert after(*output, CLOSE, 9).due == () and after(*output, CLOSE, 9).over


def test_reasoning_that_begins_in_the_prompt_counts_from_the_first_token() -> None:
    assert after(1, begun=True).due == () and after(1, 2, begun=True).due == (CLOSE, 9)
    assert after(tokens=0, begun=True).due == (CLOSE, 9)


def test_reasoning_that_ends_by_itself_is_over() -> None:
    ended = after(OPEN, 1, CLOSE)
    assert ended.due == () and ended.over and not ended.used_up
    assert after(OPEN, 1, CLOSE, 1, 2, 3, OPEN, 4, 5, 6).due == ()


def test_text_before_the_opening_means_no_reasoning() -> None:
    assert after(1, OPEN, 2, 3, 4).due == () and after(1).over and not after(BLANK).over


def test_reasoning_that_may_open_anywhere_shares_one_budget() -> None:
    twice = after(1, OPEN, 2, CLOSE, 1, OPEN, 3, blanks=None)
    assert twice.due == (CLOSE, 9) and not after(1, 2, blanks=None).over
    assert after(OPEN, 1, 2, CLOSE, 9, OPEN, blanks=None).due == (CLOSE, 9), "nothing is left"


def test_token_that_a_grammar_put_before_the_end_leaves_the_end_due() -> None:
    assert after(OPEN, 1, 2, 3).due == (CLOSE, 9)


@pytest.mark.parametrize(("output", "opens"), [
    ((7, 6, 1, 1), True), ((BLANK, 7, 6, 1, 1), True), ((7, 1, 6, 1, 1), False), ((7, BLANK, 6, 1), False),
])  # fmt: skip
def test_opening_of_several_tokens_is_found_at_the_beginning_only(output: tuple[int, ...], opens: bool) -> None:
    thinking = Thinking(ThinkingBudget(2, (7, 6), CLOSE, (CLOSE,), False, (BLANK,)))
    for count in range(1, len(output) + 1):
        thinking.accept(output[:count])
    assert (thinking.due == (CLOSE,)) is opens and thinking.over is not opens
