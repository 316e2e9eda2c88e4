"""Drafts from a predicted text follow the output, find the place again after an edit, and are counted by result."""

import random

import pytest

from worker.scheduler.drafts import PredictedDrafter
from worker.scheduler.sequence import Prediction

PROMPT = [900, 901, 902]


def written(output: list[int], predicted: list[int], limit: int = 15, cost: float = 0.03) -> tuple[int, Prediction]:
    """Returns the number of steps that an output takes with drafts from a predicted text."""
    prediction, tokens, steps = Prediction(predicted), [*PROMPT, output[0]], 1
    drafter = PredictedDrafter(prediction, len(PROMPT))
    while (done := len(tokens) - len(PROMPT)) < len(output):
        drafts = drafter.propose(tokens, min(limit, len(output) - done - 1), cost)
        right = 0
        while right < len(drafts) and drafts[right] == output[done + right]:
            right += 1
        if drafts:
            drafter.record(len(drafts), right)
        tokens += output[done : done + right + 1]
        steps += 1
    assert tokens[len(PROMPT) :] == output
    return steps, prediction


def test_text_that_comes_as_predicted_takes_few_steps() -> None:
    text = [random.Random(1).randrange(800) for _ in range(500)]
    steps, prediction = written(text, text)
    assert steps < 60 and prediction.rejected == 0 and prediction.accepted == 500 - steps


@pytest.mark.parametrize("seed", range(5))
def test_edits_cost_a_few_steps_each(seed: int) -> None:
    draw = random.Random(seed)
    text = [draw.randrange(800) for _ in range(500)]
    edited = [*text[:100], 850, 851, 852, *text[101:250], *text[260:400], 853, *text[401:]]
    steps, prediction = written(edited, text)
    assert steps < 90 and prediction.accepted > 380


def test_other_text_costs_no_drafts_for_long() -> None:
    draw = random.Random(3)
    text, other = ([draw.randrange(low, low + 400) for _ in range(300)] for low in (0, 400))
    steps, prediction = written(other, text)
    assert steps > 250 and prediction.accepted == 0 and prediction.rejected < 20


def test_place_after_repeated_words_is_the_next_one() -> None:
    line = [1, 2, 3, 4]
    text = [*line, 10, *line, 11, *line, 12, *line, 13]
    steps, _ = written([7, *text], text)
    assert steps <= 8


def test_empty_prediction_and_stop() -> None:
    steps, prediction = written([5, 6, 7], [])
    assert steps == 3 and prediction.accepted == prediction.rejected == 0
    drafter = PredictedDrafter(Prediction([5, 6, 7, 8]), 1)
    assert drafter.propose([0, 5], 3, 0.03) == (6, 7, 8)[: len(drafter.propose([0, 5], 3, 0.03))] != ()
    drafter.stop()
    assert drafter.propose([0, 5], 3, 0.03) == ()
