"""A check of an answer: the output is compared with its ids, which are computed as drafts of the last known token."""

from dataclasses import dataclass

MOST_DRAFTS = 255  # each has a row of logits, which is as long as the vocabulary


@dataclass(slots=True, eq=False)
class AnswerCheck:
    """The answer that a sequence checks, and how many of its ids a step may compute."""

    answer: list[int]
    most_drafts: int = MOST_DRAFTS  # in one step; halved when a step has failed

    def ahead(self, output_len: int) -> int:
        """Returns how many ids can be drafts after so much output. The last id is only compared, never computed."""
        return max(0, len(self.answer) - output_len - 1)

    def drafts(self, output_len: int) -> tuple[int, ...]:
        """Returns the ids that can be drafts of the next step."""
        return tuple(self.answer[output_len : output_len + min(self.ahead(output_len), self.most_drafts)])

    def finished(self, output_len: int, last: int) -> bool:
        """Whether the check is over: the output is as long as the answer, or its `last` token differs."""
        return output_len >= len(self.answer) or (output_len > 0 and last != self.answer[output_len - 1])

    def failed(self, drafts: int) -> None:
        """Notes that a step with so many drafts has failed: the next ones have fewer."""
        self.most_drafts = drafts // 2
