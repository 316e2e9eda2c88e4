"""Computes existing output again, because the next tokens depend on more than the ids (see mirostat.py)."""

from dataclasses import dataclass

from worker.schedule.records.answer_check import AnswerCheck
from worker.schedule.sequence import Sequence

MOST_REPLAYED = 31  # most tokens to replay in one step; each needs a row of logits, copied to the host


@dataclass(slots=True, eq=False)
class Replay(AnswerCheck):
    """Existing output, computed again as drafts. After it, the sequence continues as if it had no check."""

    sequence: Sequence | None = None

    def finished(self, output_len: int, last: int) -> bool:
        """Returns False. At the end of the replayed output, it also removes this check from the sequence."""
        if output_len >= len(self.answer) and self.sequence is not None:
            self.sequence.check = None
            self.sequence = None
        return False


def replay(sequence: Sequence, output: list[int]) -> None:
    """Makes a sequence compute its output again.

    A step can report the log-probabilities of only one token, so a sequence that reports them replays token by token.
    """
    most = MOST_REPLAYED if sequence.sampling.logprobs is None else 0
    sequence.check = Replay(output, most, sequence)
