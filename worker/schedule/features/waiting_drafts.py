"""Keeps the drafts of a draft model until they are planned: the model proposes them for all sequences at once.

The number of drafts follows the measured acceptance and the measured time of a step. The draft model runs within a
step, so its time counts: a model that takes long for the drafts that are accepted is asked for fewer, down to none.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

from worker.schedule.features.speculation import Acceptance
from worker.schedule.sequence import Sequence

INITIAL_ACCEPTANCE = 0.6  # a model's drafts are right more often than repetitions


class Proposer(Protocol):
    """Runs a model (worker/run/drafters/)."""

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Returns for each sequence at most so many tokens that may follow its tokens."""

    def forget(self, target: Sequence) -> None:
        """Takes back what is held of a sequence that has left."""


class WaitingDrafts:
    """The drafts of one sequence. See Drafter."""

    def __init__(self) -> None:
        self.waiting: tuple[int, ...] = ()
        self._acceptance = Acceptance(INITIAL_ACCEPTANCE)
        self._stopped = False

    def wanted(self, limit: int, cost: float, repeats: int) -> int:
        """Returns how many drafts are worth asking the model for."""
        return 0 if self._stopped else self._acceptance.draft_length(limit, cost, repeats)

    def propose(self, tokens: list[int], limit: int, cost: float, repeats: int = 0) -> tuple[int, ...]:
        """Returns the drafts that wait. They were asked for with these tokens."""
        drafts, self.waiting = self.waiting[:limit], ()
        return drafts

    def record(self, drafted: int, accepted: int) -> None:
        self._acceptance.record(accepted, rejected=accepted < drafted)

    def stop(self) -> None:
        self._stopped = True


def ask(proposer: Proposer, wanted: Seq[tuple[Sequence, WaitingDrafts, int]]) -> None:
    """Asks the model for so many drafts of each sequence."""
    proposed = proposer.propose([(sequence, count) for sequence, _, count in wanted]) if wanted else []
    for (_, drafter, _), drafts in zip(wanted, proposed, strict=True):
        drafter.waiting = drafts
