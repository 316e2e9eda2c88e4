"""Keeps the drafts of a draft model until they are planned, because the model proposes them for all sequences at once.

The number of drafts depends on the measured acceptance and on the measured times of a step and of the draft model. A
draft model that is too slow for its acceptance is asked for fewer drafts, down to none. Where the text repeats itself,
the drafts are taken from the text if these are expected to gain more.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

from worker.schedule.features.speculation import LEARNING_RATE, Acceptance, NgramDrafter
from worker.schedule.sequence import Sequence

INITIAL_ACCEPTANCE = 0.6  # assumed acceptance rate: a model's drafts are right more often than NgramDrafter's
PROBE_EVERY = 24  # steps until a sequence without drafts gets one again, if drafts are accepted in other sequences
RESULTS = 32  # a sequence's first rate is the mean of about this many results of earlier sequences


class Proposer(Protocol):
    """Runs a draft model (worker/run/drafters/)."""

    @property
    def seconds(self) -> float:
        """The duration of the last propose()."""

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Returns drafts for each sequence. wanted: sequences, each with the maximum number of its drafts."""

    def forget(self, target: Sequence) -> None:
        """Frees the memory of a sequence that has ended."""


class Experience:
    """The draft model's acceptance in earlier sequences: how often the first draft of a step was accepted.

    If the draft model is useless for a task, new sequences of this task need not find that out again.
    """

    def __init__(self) -> None:
        self._acceptance = INITIAL_ACCEPTANCE

    @property
    def acceptance(self) -> float:
        return self._acceptance

    def begin(self) -> float:
        """Returns the acceptance rate for a new sequence. Each call raises a low rate: a bad model is tried again."""
        expected = self._acceptance
        self._acceptance += (INITIAL_ACCEPTANCE - expected) / RESULTS
        return expected

    def record(self, *, accepted: bool) -> None:
        self._acceptance += (accepted - self._acceptance) / RESULTS


class WaitingDrafts:
    """The drafts of one sequence. Implements Drafter.

    A sequence begins with one draft per step, and gets more only after drafts are accepted. The first results count
    more than later ones. A useless draft model therefore costs little time. If a good model's first drafts for a
    sequence were wrong, it is tried again from time to time.
    """

    def __init__(self, experience: Experience, text: NgramDrafter | None = None) -> None:
        """text: also proposes drafts, from the sequence's own text."""
        self._text = text
        self._of_text = False  # whether the waiting (or, if none wait, the last) drafts came from the text
        self.waiting: tuple[int, ...] = ()
        self._experience = experience
        self._acceptance = Acceptance(INITIAL_ACCEPTANCE, experience.begin())
        self._accepted = self._results = self._steps = 0
        self._stopped = False

    @property
    def tried(self) -> bool:
        """Whether drafts of the draft model have been computed for this sequence."""
        return self._results > 0

    def wanted(self, tokens: list[int], limit: int, text_cost: float, cost: float, repeats: int) -> int:
        """Returns how many drafts are worth asking the draft model for: 0 if drafts from the text promise more.

        text_cost: the cost of a draft from the text. cost: the cost of a draft from the model.
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
        """Returns the waiting drafts. wanted() was called before with the same tokens."""
        drafts, self.waiting = self.waiting[:limit], ()
        return drafts

    def record(self, drafted: int, accepted: int) -> None:
        if self._text is not None and self._of_text:
            self._text.record(drafted, accepted)
            return
        self._accepted += accepted
        self._results += 1
        self._experience.record(accepted=accepted > 0)
        rate = max(LEARNING_RATE, 1 / (1 + self._results))  # a plain mean of the first results, then LEARNING_RATE
        self._acceptance.record(accepted, rejected=accepted < drafted, rate=rate)

    def stop(self) -> None:
        self._stopped = True


def ask(proposer: Proposer, wanted: Seq[tuple[Sequence, WaitingDrafts, int]]) -> None:
    """Asks the draft model for drafts, and gives them to the drafters. wanted: (sequence, its drafter, most drafts)."""
    proposed = proposer.propose([(sequence, count) for sequence, _, count in wanted])
    for (_, drafter, _), drafts in zip(wanted, proposed, strict=True):
        drafter.waiting = drafts
