"""Drafts with recurrent states: after a rejected draft, the accepted tokens are computed again."""

from typing import Any

import pytest

from tests.worker.scheduler.harness import OracleDrafter, Rig, reference, set_drafter
from worker.scheduler.ngrams import Acceptance
from worker.scheduler.sequence import TILE, Plan, Sequence, slots_of


class WrongAt(OracleDrafter):
    """Proposes the right tokens, except at some positions."""

    def __init__(self, tokens: list[int], wrong: set[int]) -> None:
        super().__init__(tokens)
        self._wrong = wrong

    def _guess(self, place: int) -> int:
        if place >= len(self._tokens):
            return 0
        return self._tokens[place] + (place in self._wrong)


def recurrent(**settings: Any) -> Rig:
    return Rig(**{"pages": 65, "page_size": 32, "slots": 20, "max_draft_tokens": 4, **settings})


def submit(rig: Rig, prompt: list[int], wrong: set[int], max_tokens: int = 24) -> Sequence:
    sequence = rig.submit(prompt, max_tokens, ignore_eos=True)
    set_drafter(rig.scheduler, sequence, WrongAt(reference(sequence, rig.config)[0], wrong))
    return sequence


def shapes(plan: Plan) -> list[tuple[int, int, int]]:
    return [(chunk.start, chunk.length, len(chunk.drafts)) for chunk in plan.chunks]


def test_right_tokens_are_computed_again_with_the_next_drafts() -> None:
    one = recurrent()
    sequence = submit(one, [1, 2, 3], wrong={6})  # the third draft of the first step with drafts
    one.step()
    assert shapes(one.plan()) == [(3, 5, 4)]
    (update,) = one.step()
    assert len(update.tokens) == 3 and sequence.computed_tokens == 3, "the step does not count"
    assert list(slots_of(sequence).at) == [3] and len(slots_of(sequence).free) == 1
    assert shapes(one.plan()) == [(3, 8, 4)], "four known tokens, and new drafts"
    (update,) = one.step()
    assert len(update.tokens) == 5 and sequence.computed_tokens == 11 and list(slots_of(sequence).at) == [11]
    one.finish(30)


def test_rejections_in_a_row_never_fill_more_than_a_tile() -> None:
    one = recurrent(max_draft_tokens=15)
    sequence = submit(one, [1, 2, 3], wrong=set(range(6, 60, 2)), max_tokens=28)
    one.step()
    rows = []
    while sequence not in one.ends:
        plan = one.plan()
        rows.append(plan.tokens)
        one.commit(plan, one.run(plan))
    assert max(rows) == TILE and one.scheduler.status.accepted_tokens > 0


def test_repeated_rows_beside_a_prompt_have_no_drafts() -> None:
    one = recurrent()
    submit(one, [1, 2, 3], wrong={5})
    one.step()
    one.step()
    submit(one, [4, 5, 6], wrong=set())
    assert shapes(one.plan()) == [(3, 3, 0), (0, 3, 0)]
    one.finish(40)


def test_drafts_end_at_the_next_checkpoint_which_is_published() -> None:
    one = recurrent(page_size=4, pages=65, state_checkpoint_tokens=8)
    submit(one, [1, 2, 3, 4, 5], wrong=set())
    ends = set()
    while one.scheduler.has_work:
        plan = one.plan()
        ends |= {chunk.start + chunk.length for chunk in plan.chunks}
        one.commit(plan, one.run(plan))
    assert {8, 16, 24} <= ends and one.slots is not None and one.slots.counts().cached == 4, "and after four tokens"


def test_preempted_between_two_attempts_starts_anew() -> None:
    one = recurrent()
    sequence = submit(one, [1, 2, 3], wrong={5})
    one.step()
    one.step()
    assert sequence.uncomputed_tokens == 3
    one.scheduler.state.preempt(sequence, one.now)
    one.finish(40)
    assert sequence in one.ends, "with the tokens of the reference, in check_updates()"


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8, 0.95])
def test_number_of_drafts_pays_for_the_rows_that_a_rejection_repeats(acceptance: float) -> None:
    """The chosen number of drafts gives the most expected tokens for the expected cost of all rows."""
    kind, cost, repeats = Acceptance(), 0.07, 3
    kind.acceptance = acceptance

    def speed(count: int) -> float:
        first_rejected = [acceptance**before * (1 - acceptance) for before in range(count)]
        again = sum(share * (repeats + before) for before, share in enumerate(first_rejected))
        return sum(acceptance**at for at in range(count + 1)) / (1 + cost * (count + again))

    chosen = kind.draft_length(12, cost, repeats)
    assert speed(chosen) == max(map(speed, range(13)))
    assert chosen <= kind.draft_length(12, cost)
