"""A text that the client expects as the output, and what came of it. Its ids become drafts (features/predicted.py)."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Prediction:
    """accepted, rejected: how many of its tokens were drafts that became output, and drafts that did not."""

    ids: list[int]
    accepted: int = 0
    rejected: int = 0
