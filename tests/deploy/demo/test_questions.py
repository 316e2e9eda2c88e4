"""The question families of the training text, and the data files that they read."""

from random import Random

import pytest

from deploy.demo.training import facts, questions
from deploy.demo.training.exchange import WORDINGS
from deploy.demo.training.stories import THEMES, story

# all families except the one that repeats a random text, which may be "{}"
FAMILIES = [family for family, _ in questions.FAMILIES if family is not questions.nonsense]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_family_fills_in_every_slot(family: questions.Family) -> None:
    rng = Random(1)
    for _ in range(200):
        question, answer = family(rng)
        assert question and answer
        assert "{" not in question + answer and "}" not in question + answer


def test_data_files_have_rows_without_duplicates() -> None:
    assert len(facts.COUNTRIES) > 150 and len({row.name for row in facts.COUNTRIES}) == len(facts.COUNTRIES)
    assert set(facts.FAMOUS) <= {row.name for row in facts.COUNTRIES}
    assert len(facts.MONTHS) == len(facts.MONTH_DAYS) == 12 and len(facts.DAYS) == 7
    assert all(WORDINGS.values()) and all(theme.topics and theme.body for theme in THEMES)


def test_story_fills_in_every_slot() -> None:
    rng = Random(2)
    for _ in range(200):
        assert "{" not in "".join(story(rng))
