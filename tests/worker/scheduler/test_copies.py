"""A copied text is followed through what the copy replaces, and replacements are expected again."""

import random

import pytest

from worker.kv_cache.recent_texts import RecentTexts
from worker.scheduler import copies
from worker.scheduler.copies import MOST_REPLACED, Copy
from worker.scheduler.ngrams import NgramDrafter

FREE = 0.0
END, QUOTE = 500, 501  # ids of a line's end and of a quotation mark
ESCAPED = {END: [600, 601], QUOTE: [602]}


def escaped(text: list[int]) -> list[int]:
    return [id for token in text for id in ESCAPED.get(token, [token])]


def lines(count: int, seed: int = 1, length: int = 3) -> list[int]:
    """Returns lines of random ids, each too short for a match of eight tokens."""
    draw = random.Random(seed)
    return [id for _ in range(count) for id in (*(draw.randrange(100, 400) for _ in range(length)), QUOTE, 7, END)]


def accepted(text: list[int], answer: list[int], drafter: NgramDrafter, limit: int = 15) -> tuple[int, int]:
    """Returns in how many steps a drafter's sequence writes an answer after a text, and how many drafts are wrong."""
    tokens, at, steps, wrong = [*text, 1, 2, answer[0]], 1, 0, 0
    while at < len(answer):
        drafts = drafter.propose(tokens, limit, FREE)
        right = next((n for n, id in enumerate(drafts) if at + n >= len(answer) or id != answer[at + n]), len(drafts))
        if drafts:
            drafter.record(len(drafts), right)
        wrong += len(drafts) - right
        tokens += answer[at : at + right + 1]
        at, steps = at + right + 1, steps + 1
    return steps, wrong


def test_copy_into_a_json_string_is_drafted_through_the_escapes() -> None:
    text = lines(60)
    answer = escaped(text)
    steps, wrong = accepted(text, answer, NgramDrafter())
    assert steps < len(answer) / 6, f"{steps} steps for {len(answer)} tokens; {wrong} wrong drafts"


def test_edit_that_renames_is_drafted_with_the_new_name() -> None:
    draw = random.Random(3)
    text = [id for _ in range(40) for id in (*(draw.randrange(100, 400) for _ in range(9)), 40, 41)]
    answer = [id for token in text for id in {40: (50, 51, 52), 41: ()}.get(token, (token,))]
    steps, _ = accepted(text, answer, NgramDrafter())
    assert steps < len(answer) / 6


def test_replacement_that_is_not_repeated_is_forgotten() -> None:
    copy = Copy()
    text = [1, 2, 3, 9, 4, 5, 6, 9, 7, 8, 9, 10, 11]
    tokens = [*text, 99]
    copy.begin(tokens, 0, 8, text)
    tokens += [1, 2, 3, 77, 4, 5]
    copy.follow(tokens)
    assert not copy.parted and copy.ahead(tokens, 4) == (6, 77, 7, 8)
    tokens += [6, 9]
    copy.follow(tokens)
    assert copy.ahead(tokens, 4) == (7, 8, 9, 10)


def test_replacement_of_several_tokens_that_fails_midway_is_forgotten() -> None:
    copy, text = Copy(), [1, 2, 9, 3, 4, 9, 5, 6, 7]
    tokens = [0]
    copy.begin(tokens, 0, 8, text)
    tokens += [1, 2, 70, 71, 3, 4]
    copy.follow(tokens)
    assert copy.ahead(tokens, 4) == (70, 71, 5, 6)
    tokens += [70, 80, 5, 6]
    copy.follow(tokens)
    assert not copy.parted and copy.ahead(tokens, 2) == (7,)


def test_insertions_and_deletions_are_passed_and_not_repeated() -> None:
    text = [*range(100, 140)]
    copy, tokens = Copy(), [0]
    copy.begin(tokens, 0, 8, text)
    tokens += [100, 101, 1, 2, 3, 102, 103, 110, 111]
    copy.follow(tokens)
    assert not copy.parted and copy.ahead(tokens, 3) == (112, 113, 114)


def test_copy_that_has_parted_too_far_ends() -> None:
    copy, tokens = Copy(), [0]
    copy.begin(tokens, 0, 8, [*range(100, 140)])
    tokens += [100, 101, *range(1, MOST_REPLACED + 4)]
    copy.follow(tokens)
    assert copy.run == 0 and not copy.parted


def test_copy_of_the_sequence_itself_repeats_what_it_writes() -> None:
    copy, tokens = Copy(), [5, 1, 2, 3, 1, 2, 3]
    copy.begin(tokens, 4, 8)
    assert copy.ahead(tokens, 7) == (1, 2, 3, 1, 2, 3, 1)


def test_copy_is_followed_with_random_edits_without_an_error() -> None:
    draw = random.Random(5)
    for seed in range(60):
        text = lines(30, seed)
        answer = escaped(text)
        for _ in range(draw.randrange(25)):
            at = draw.randrange(1, len(answer) - 1)
            answer[at : at + draw.randrange(12)] = [draw.randrange(100, 400) for _ in range(draw.randrange(12))]
        steps, _ = accepted(text, answer, NgramDrafter())
        assert steps <= len(answer)


def test_later_copies_of_a_scope_use_what_an_earlier_one_has_replaced() -> None:
    learned = {(1,): (51,), (2,): (52, 53), (3, 4): (54,)}
    text = [10, 1, 11, 12, 2, 13, 3, 4, 14]
    copy, tokens = Copy(learned), [0]
    copy.begin(tokens, 0, 8, text)
    tokens += [10]
    copy.follow(tokens)
    assert copy.ahead(tokens, 3) == (1, 11, 12), "the copy may be one of another kind"
    tokens += [51, 11, 12]
    copy.follow(tokens)
    assert copy.ahead(tokens, 5) == (52, 53, 13, 54, 14), "it is of the same kind"
    tokens += [2, 13]
    copy.follow(tokens)
    assert (2,) not in learned and copy.ahead(tokens, 2) == (54, 14)


def test_replacements_of_a_scope_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MOST_LEARNED", 3)
    learned: dict[tuple[int, ...], tuple[int, ...]] = {}
    text = [*range(100, 160)]
    copy, tokens = Copy(learned), [0]
    copy.begin(tokens, 0, 8, text)
    tokens += [id if id % 5 else id + 500 for id in text]
    copy.follow(tokens)
    assert len(learned) == 3 and (150,) in learned and (105,) not in learned
    texts = RecentTexts()
    texts.replacements[1,] = (2,)
    texts.clear()
    assert not texts.replacements
