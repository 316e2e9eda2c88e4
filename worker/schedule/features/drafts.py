"""Draft tokens of a chunk: guessed next tokens, computed in the same step and accepted if the same ids are sampled.

speculation.py guesses drafts; records/answer_check.py takes them from an answer.
"""

from itertools import takewhile
from typing import TYPE_CHECKING

from worker.schedule.sequence import Chunk

if TYPE_CHECKING:
    from worker.schedule.features.speculation import Speculation


def accepted_ids(ids: list[int], drafts: tuple[int, ...]) -> list[int]:
    """Returns the valid sampled ids: all up to and including the first id that differs from its draft."""
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, drafts, strict=False)))
    return ids[: right + 1]


def without_drafts(chunk: Chunk, speculation: "Speculation | None") -> Chunk:
    """Returns the chunk without drafts, for a retry. Later steps have no drafts, or fewer if an answer is checked."""
    if chunk.sequence.check is not None:
        chunk.sequence.check.failed(len(chunk.drafts))
    elif speculation is not None:
        speculation.failed(chunk.sequence)
    return Chunk(chunk.sequence, chunk.start, chunk.length - len(chunk.drafts), chunk.samples)
