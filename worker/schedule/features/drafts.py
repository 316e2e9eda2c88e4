"""Draft tokens of a chunk: guessed next tokens, which are computed in the same step and accepted if sampled, too.

speculation.py guesses them from the text of a sequence; answer_check.py takes them from an answer.
"""

from itertools import takewhile
from typing import TYPE_CHECKING

from worker.schedule.sequence import Chunk

if TYPE_CHECKING:
    from worker.schedule.features.speculation import Speculation


def accepted_ids(ids: list[int], drafts: tuple[int, ...]) -> list[int]:
    """Returns the valid sampled ids: those up to and including the first that differs from its draft."""
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, drafts, strict=False)))
    return ids[: right + 1]


def without_drafts(chunk: Chunk, speculation: "Speculation | None") -> Chunk:
    """Returns the chunk without its drafts, for a retry. Its sequence gets no more drafts, or fewer of an answer."""
    if chunk.sequence.check is not None:
        chunk.sequence.check.failed(len(chunk.drafts))
    elif speculation is not None:
        speculation.failed(chunk.sequence)
    return Chunk(chunk.sequence, chunk.start, chunk.length - len(chunk.drafts), chunk.samples)
