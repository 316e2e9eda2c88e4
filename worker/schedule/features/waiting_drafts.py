"""Keeps the drafts of a draft model until they are planned: the model proposes them for all sequences at once.

The number of drafts follows the measured acceptance and the measured times of a step and of the model: a model that
takes long for the drafts that are accepted is asked for fewer, down to none. Where the text repeats itself, the drafts
are taken from the text if they promise more.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

from worker.schedule.features.speculation import LEARNING_RATE, Acceptance, NgramDrafter
from worker.schedule.sequence import Sequence

INITIAL_ACCEPTANCE = 0.6  # a model's drafts are right more often than repetitions
PROBE_EVERY = 24  # steps: a sequence whose first drafts were unlucky is tried again if others were not
RESULTS = 32  # a sequence begins with the mean of about so many results of the sequences before


class Proposer(Protocol):
    """Runs a model (worker/run/drafters/)."""

    @property
    def seconds(self) -> float:
        """What the last proposals took."""

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Returns for each sequence at most so many tokens that may follow its tokens."""

    def forget(self, target: Sequence) -> None:
        """Takes back what is held of a sequence that has left."""


class Experience:
    """What the sequences before have shown of the model: how often the first draft of a step is accepted.

    A model that is useless for a task is so for most of its requests, and each of them would ask it anew.
    """

    def __init__(self) -> None:
        self._acceptance = INITIAL_ACCEPTANCE

    @property
    def acceptance(self) -> float:
        return self._acceptance

    def begin(self) -> float:
        """Returns the acceptance to begin a sequence with. It recovers a little, to try a bad model again."""
        expected = self._acceptance
        self._acceptance += (INITIAL_ACCEPTANCE - expected) / RESULTS
        return expected

    def record(self, *, accepted: bool) -> None:
        self._acceptance += (accepted - self._acceptance) / RESULTS


class WaitingDrafts:
    """The drafts of one sequence. See Drafter.

    They begin with one in a step, and become more only as they are accepted. The first results count more than later
    ones. A useless model therefore loses little. A good one is tried again from time to time where its first drafts
    were wrong.
    """

    def __init__(self, experience: Experience, text: NgramDrafter | None = None) -> None:
        """text: proposes drafts, too, from the sequence's own text."""
        self._text = text
        self._of_text = False  # whether the waiting drafts, or the last ones, are those of the text
        self.waiting: tuple[int, ...] = ()
        self._experience = experience
        self._acceptance = Acceptance(INITIAL_ACCEPTANCE, experience.begin())
        self._accepted = self._results = self._steps = 0
        self._stopped = False

    @property
    def tried(self) -> bool:
        """Whether drafts of the model have been computed."""
        return self._results > 0

    def wanted(self, tokens: list[int], limit: int, text_cost: float, cost: float, repeats: int) -> int:
        """Returns how many drafts are worth asking the model for: none if drafts of the text promise more.

        text_cost, cost: of a draft from the text, and of one of the model.
        """
        if self._stopped:
            return 0
        self._steps += 1
        count = self._acceptance.draft_length(min(limit, 1 + self._accepted), cost, repeats)
        if not count and self._steps % PROBE_EVERY == 0 and self._experience.acceptance > cost:
            count = 1
        if self._text is not None:
            least = self._acceptance.gain(count, cost)
            self.waiting = self._text.propose_above(least, tokens, limit, text_cost, repeats)
        self._of_text = bool(self.waiting)
        return 0 if self._of_text else count

    def propose(self, tokens: list[int], limit: int, cost: float, repeats: int = 0) -> tuple[int, ...]:
        """Returns the drafts that wait. They were asked for with these tokens."""
        drafts, self.waiting = self.waiting[:limit], ()
        return drafts

    def record(self, drafted: int, accepted: int) -> None:
        if self._text is not None and self._of_text:
            self._text.record(drafted, accepted)
            return
        self._accepted += accepted
        self._results += 1
        self._experience.record(accepted=accepted > 0)
        rate = max(LEARNING_RATE, 1 / (1 + self._results))  # that of a mean, until there are many results
        self._acceptance.record(accepted, rejected=accepted < drafted, rate=rate)

    def stop(self) -> None:
        self._stopped = True


def ask(proposer: Proposer, wanted: Seq[tuple[Sequence, WaitingDrafts, int]]) -> None:
    """Asks the model for so many drafts of each sequence."""
    proposed = proposer.propose([(sequence, count) for sequence, _, count in wanted])
    for (_, drafter, _), drafts in zip(wanted, proposed, strict=True):
        drafter.waiting = drafts
