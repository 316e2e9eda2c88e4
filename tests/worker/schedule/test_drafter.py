"""What is guessed to come next, and how much of it is thought to be worth a row."""

import pytest

from worker.schedule.speculation import INDEXED_PER_STEP, NgramDrafter

FREE = 0.0  # a price at which every guess is worth it


def test_what_followed_the_same_words_last_is_proposed() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 1, 2, 3, 6, 7, 9, 8, 1, 2, 3]
    assert NgramDrafter().propose(tokens, 3, FREE) == (6, 7, 9)


def test_three_tokens_that_were_the_same_say_more_than_one() -> None:
    assert NgramDrafter().propose([1, 2, 3, 7, 5, 3, 8, 1, 2, 3], 1, FREE) == (7,)
    assert NgramDrafter().propose([1, 2, 3, 7, 5, 3, 8, 4, 2, 3], 1, FREE) == (8,)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_what_never_was_says_nothing(tokens: list[int]) -> None:
    assert NgramDrafter().propose(tokens, 7, FREE) == ()


def test_what_goes_round_is_expected_to_go_round_again() -> None:
    assert NgramDrafter().propose([5, 1, 2, 1, 2, 1, 2], 5, FREE) == (1, 2, 1, 2, 1)


def test_it_learns_from_tokens_as_they_come() -> None:
    drafter, tokens = NgramDrafter(), [1, 2, 3]
    for _ in range(3):
        assert drafter.propose(tokens, 2, FREE) == ()
        tokens = [*tokens, 10 + len(tokens)]
    assert drafter.propose([*tokens, 1, 2, 3], 2, FREE) == tuple(tokens[3:5])


def test_a_long_prompt_is_read_in_several_steps() -> None:
    tokens = [1, 2, 3, *range(100, 100 + 2 * INDEXED_PER_STEP), 7, 8, 9, 5, 1, 2, 3]
    early = NgramDrafter()
    assert early.propose(tokens, 2, FREE) == (100, 101), "its beginning is known at once"
    late, tokens = NgramDrafter(), [*tokens, 7, 8, 9]
    assert [late.propose(tokens, 1, FREE) for _ in range(3)] == [(), (), (5,)]


def test_more_is_proposed_while_guesses_come_true_and_less_while_they_do_not() -> None:
    tokens = [*range(20), *range(5)]
    drafter, price = NgramDrafter(), 0.1
    assert len(drafter.propose(tokens, 7, price)) == 3, "a half, a quarter, an eighth"
    for _ in range(10):
        drafter.record(7, 7)
    assert len(drafter.propose(tokens, 7, price)) == 7
    for _ in range(7):
        drafter.record(7, 0)
    assert len(drafter.propose(tokens, 7, price)) == 1


def test_guesses_in_vain_become_rare_and_never_cease() -> None:
    tokens, drafter, rows = [*range(20), *range(5)], NgramDrafter(), [0] * 1000
    for step in range(1000):
        rows[step] = len(drafter.propose(tokens, 7, 1 / 40))
        if rows[step]:
            drafter.record(rows[step], 0)
    assert 5 < sum(rows[500:]) < 100 and max(rows[500:]) == 1


def test_chances_of_one_do_not_end_in_endless_rows() -> None:
    drafter, tokens = NgramDrafter(), [*range(20), *range(5)]
    drafter.propose(tokens, 7, FREE)
    drafter.record(10_000, 10_000)
    assert len(drafter.propose(tokens, 7, 0.99)) == 7 and drafter.propose(tokens, 7, 1.0) == ()


def test_one_that_was_stopped_is_silent() -> None:
    drafter, tokens = NgramDrafter(), [*range(20), *range(5)]
    assert drafter.propose(tokens, 7, FREE)
    drafter.stop()
    drafter.record(7, 0)
    assert drafter.propose(tokens, 7, FREE) == ()
