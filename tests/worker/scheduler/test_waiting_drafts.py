"""The number of drafts of a model follows the share of accepted drafts, in this and in earlier sequences."""

import random

import pytest

from tests.worker.scheduler.harness import VOCAB, Rig, Rule, reference
from worker.scheduler.drafts import PROBE_EVERY, Experience, WaitingDrafts
from worker.scheduler.ngrams import NgramDrafter
from worker.scheduler.sequence import Sequence

LIMIT, COST = 7, 0.2


def asked(drafter: WaitingDrafts, right: float, steps: int = 100) -> list[int]:
    """Returns the number of drafts that each step asks for if a draft is right with probability `right`."""
    draw, counts = random.Random(3), []
    for _ in range(steps):
        count = drafter.wanted([], LIMIT, COST, COST, 0)
        counts.append(count)
        if count:
            outcomes = [draw.random() < right for _ in range(count)]
            drafter.record(count, outcomes.index(False) if False in outcomes else count)
    return counts


def test_useless_model_is_asked_for_a_few_single_drafts() -> None:
    counts = asked(WaitingDrafts(Experience()), 0.0)
    assert counts[0] == 1 and max(counts) == 1 and sum(counts) <= 4 + len(counts) // PROBE_EVERY


def test_model_that_is_wrong_at_first_is_tried_again_unless_it_has_been_wrong_for_others() -> None:
    for usually, probes in ((0.6, 2), (0.1, 0)):
        experience = Experience()
        for _ in range(400):
            experience.record(accepted=random.Random(_).random() < usually)
        drafter = WaitingDrafts(experience)
        while drafter.wanted([], LIMIT, COST, COST, 0):
            drafter.record(1, 0)
        drafter.record(1, 0)
        assert sum(drafter.wanted([], LIMIT, COST, COST, 0) for _ in range(2 * PROBE_EVERY)) == probes


def test_perfect_model_is_soon_asked_for_the_most_drafts() -> None:
    counts = asked(WaitingDrafts(Experience()), 1.0)
    assert counts[0] == 1 and counts[4:] == [LIMIT] * (len(counts) - 4)


@pytest.mark.parametrize("right", [0.6, 0.8])
def test_good_model_is_never_given_up(right: float) -> None:
    counts = asked(WaitingDrafts(Experience()), right, 300)
    assert sum(counts[-100:]) > 150


def test_sequences_begin_with_what_those_before_have_shown_and_try_a_bad_model_again() -> None:
    experience = Experience()
    sums = [sum(asked(WaitingDrafts(experience), 0.0, 40)) for _ in range(100)]
    assert sums[0] > 1 and max(sums[-50:]) <= 1 + 40 // PROBE_EVERY and any(sums[-10:])
    improved = [sum(asked(WaitingDrafts(experience), 0.9, 40)) for _ in range(60)]
    assert sum(improved[-10:]) > 10 * 100, "the model has become good"


def test_drafts_come_from_the_text_while_it_promises_more_than_the_model() -> None:
    text, tokens = NgramDrafter(), [1, 2, 3, 4, 9, 8, 7, 6, 5, 1, 2, 3, 4]
    drafter = WaitingDrafts(Experience(), text)
    assert drafter.wanted(tokens, LIMIT, COST, COST, 0) == 1 and drafter.propose(tokens, LIMIT, COST) == ()
    text.record(20, 20)
    assert drafter.wanted(tokens, LIMIT, COST, COST, 0) == 0
    assert drafter.propose(tokens, LIMIT, COST) == (9, 8, 7, 6, 5, 1, 2)
    drafter.record(LIMIT, LIMIT)
    asked_again = 0
    while not asked_again:
        asked_again = drafter.wanted(tokens, LIMIT, COST, COST, 0)
        drafter.propose(tokens, LIMIT, COST)
        drafter.record(LIMIT if not asked_again else 1, 0)
    assert asked_again == 1, "results of the text say nothing of the model"


class Right:
    """A proposer that knows the answer."""

    seconds = 0.0

    def __init__(self, answers: dict[Sequence, list[int]]) -> None:
        self._answers = answers

    def propose(self, wanted: "list[tuple[Sequence, int]]") -> list[tuple[int, ...]]:
        return [tuple(self._answers[one][len(one.tokens) :][:count]) for one, count in wanted]

    def forget(self, target: Sequence) -> None:
        self._answers.pop(target, None)


def test_scheduler_asks_the_model_for_all_sequences_of_a_step_and_forgets_those_that_left() -> None:
    rig = Rig(pages=65, page_size=32, max_draft_tokens=5)
    assert rig.scheduler.speculation is not None
    made = [rig.submit([at, 2, 3], 24, ignore_eos=True) for at in (4, 5)]
    answers = {one: reference(one, rig.config)[0] for one in made}
    rig.scheduler.speculation.proposer = Right(dict(answers))  # type: ignore[assignment]
    steps = 0
    while rig.scheduler.has_work:
        rig.step()
        steps += 1
    assert [one.tokens for one in made] == list(answers.values()) and steps < 15
    assert not rig.scheduler.speculation.drafters


def test_model_whose_drafts_a_rule_forbids_is_asked_less_often() -> None:
    rig = Rig(pages=200, page_size=32, max_draft_tokens=5, token_s=0.01)
    sequence = rig.submit([1, 2, 3], 60, ignore_eos=True)
    assert rig.scheduler.speculation is not None
    asked: list[int] = []

    class Forbidden(Right):
        def propose(self, wanted: "list[tuple[Sequence, int]]") -> list[tuple[int, ...]]:
            asked.append(len(sequence.tokens))
            return [(VOCAB + 1,) for _ in wanted]

    rig.scheduler.speculation.proposer = Forbidden({})
    rig.step()
    sequence.constraint = Rule(forbidden=(VOCAB + 1,))
    while rig.scheduler.has_work:
        rig.step()
    assert 1 <= len(asked) < 25


def test_waiting_drafts_follow_forced_ids_only_if_the_model_knew_them() -> None:
    drafter = WaitingDrafts(Experience())
    drafter.waiting = (1, 2, 3)
    assert drafter.propose([9], 5, COST, 0, (1, 2)) == (3,)
    drafter.waiting = (1, 2, 3)
    assert drafter.propose([9], 5, COST, 0, (1, 4)) == () and not drafter.waiting
