"""Checks an answer: its ids are computed as drafts after the last known token, and compared with the sampled ids."""

from dataclasses import dataclass

MOST_DRAFTS = 255  # drafts in one step: each needs a row of logits, which is as long as the vocabulary


@dataclass(slots=True, eq=False)
class AnswerCheck:
    """The answer that a sequence checks, and how many of its ids a step may compute."""

    answer: list[int]
    most_drafts: int = MOST_DRAFTS  # drafts in one step; halved when a step has failed

    def ahead(self, output_len: int) -> int:
        """Returns how many ids can be drafts after `output_len` output tokens. The last id is never a draft."""
        return max(0, len(self.answer) - output_len - 1)

    def drafts(self, output_len: int) -> tuple[int, ...]:
        """Returns the ids that can be drafts of the next step."""
        return tuple(self.answer[output_len : output_len + min(self.ahead(output_len), self.most_drafts)])

    def finished(self, output_len: int, last: int) -> bool:
        """Whether the check is over: the output is as long as the answer, or its `last` token is not the answer's."""
        return output_len >= len(self.answer) or (output_len > 0 and last != self.answer[output_len - 1])

    def failed(self, drafts: int) -> None:
        """Notes that a step with `drafts` drafts has failed. The next steps have half as many."""
        self.most_drafts = drafts // 2
