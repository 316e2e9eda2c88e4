"""A text that the client expects as the output. Its ids become drafts (features/predicted.py)."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Prediction:
    """The predicted text. accepted, rejected: how many of its tokens were accepted, and rejected, as drafts."""

    ids: list[int]
    accepted: int = 0
    rejected: int = 0
