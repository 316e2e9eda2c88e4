"""Keeps the drafts of a draft model until they are planned: the model proposes them for all sequences at once.

The number of drafts follows the measured acceptance and the measured time of a step. The draft model runs within a
step, so its time counts: a model that takes long for the drafts that are accepted is asked for fewer, down to none.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

from worker.schedule.features.speculation import LEARNING_RATE, Acceptance
from worker.schedule.sequence import Sequence

INITIAL_ACCEPTANCE = 0.6  # a model's drafts are right more often than repetitions
RESULTS = 32  # a sequence begins with the mean of about so many results of the sequences before


class Proposer(Protocol):
    """Runs a model (worker/run/drafters/)."""

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
    ones. A useless model therefore loses little.
    """

    def __init__(self, experience: Experience) -> None:
        self.waiting: tuple[int, ...] = ()
        self._experience = experience
        self._acceptance = Acceptance(INITIAL_ACCEPTANCE, experience.begin())
        self._accepted = self._results = 0
        self._stopped = False

    def wanted(self, limit: int, cost: float, repeats: int) -> int:
        """Returns how many drafts are worth asking the model for."""
        most = min(limit, 1 + self._accepted)
        return 0 if self._stopped else self._acceptance.draft_length(most, cost, repeats)

    def propose(self, tokens: list[int], limit: int, cost: float, repeats: int = 0) -> tuple[int, ...]:
        """Returns the drafts that wait. They were asked for with these tokens."""
        drafts, self.waiting = self.waiting[:limit], ()
        return drafts

    def record(self, drafted: int, accepted: int) -> None:
        self._accepted += accepted
        self._results += 1
        self._experience.record(accepted=accepted > 0)
        rate = max(LEARNING_RATE, 1 / (1 + self._results))  # that of a mean, until there are many results
        self._acceptance.record(accepted, rejected=accepted < drafted, rate=rate)

    def stop(self) -> None:
        self._stopped = True


def ask(proposer: Proposer, wanted: Seq[tuple[Sequence, WaitingDrafts, int]]) -> None:
    """Asks the model for so many drafts of each sequence."""
    proposed = proposer.propose([(sequence, count) for sequence, _, count in wanted]) if wanted else []
    for (_, drafter, _), drafts in zip(wanted, proposed, strict=True):
        drafter.waiting = drafts
