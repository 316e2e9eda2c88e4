"""Output that exists already and is computed again, because what follows depends on more than its ids."""

from dataclasses import dataclass

from worker.schedule.records.answer_check import AnswerCheck
from worker.schedule.sequence import Sequence

MOST_REPLAYED = 31  # tokens in one step: each has a row of logits, which comes to the host


@dataclass(slots=True, eq=False)
class Replay(AnswerCheck):
    """Output whose ids are drafts. The sequence goes on after it as without a check."""

    sequence: Sequence | None = None

    def finished(self, output_len: int, last: int) -> bool:
        """Returns False, and takes itself away at the end of the output that it replays."""
        if output_len >= len(self.answer) and self.sequence is not None:
            self.sequence.check = None
            self.sequence = None
        return False


def replay(sequence: Sequence, output: list[int]) -> None:
    """Has a sequence compute its output again.

    A step reports the log-probabilities of one token only, so a sequence that reports them replays one token at a time.
    """
    most = MOST_REPLAYED if sequence.sampling.logprobs is None else 0
    sequence.check = Replay(output, most, sequence)
