"""What the scheduler decides and the runner executes, and what came of it."""

from dataclasses import dataclass, field

import msgspec

from shared.messages import Outcome
from worker.schedule.sequence import Sequence

TILE = 16  # rows that a multiplication computes at once


class Chunk(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Compute tokens[start : start + length] of a sequence; a decode is a chunk of one, or of one and its drafts.

    A Struct, not a dataclass: hundreds are made each step, and these cost a tenth and no garbage collection.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool  # it reaches the end of the tokens, so the next one is sampled from its last row
    drafts: tuple[int, ...] = ()  # guesses at the tokens after that, which its last rows compute and sample from, too

    @property
    def rows(self) -> int:
        """How many ids are sampled: those after each draft as if all before it had come true."""
        return self.samples + len(self.drafts)


# A row of logits that an id is sampled from: whose it is, and which of its output tokens that will be, counted from 0.
Row = tuple[Sequence, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, one forward: decodes first, then prompt chunks."""

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def sampling(self) -> list[Chunk]:
        """The chunks that sample, in the order of their ids."""
        return [chunk for chunk in self.chunks if chunk.samples]

    @property
    def rows(self) -> list[Row]:
        """What is sampled from, in the order of the ids that commit() expects."""
        rows: list[Row] = []
        for chunk in self.chunks:
            if chunk.samples:
                sequence, output = chunk.sequence, chunk.sequence.next_output
                rows.append((sequence, output))
                if chunk.drafts:
                    rows += [(sequence, output + at) for at in range(1, chunk.rows)]
        return rows

    @property
    def drafts(self) -> int:
        """How many there are in all."""
        return sum([len(chunk.drafts) for chunk in self.chunks])

    def __bool__(self) -> bool:
        return bool(self.chunks)


class Advance(msgspec.Struct, frozen=True, gc=False, eq=False):
    """What a committed step did to one sequence; a prompt that is not through yet has none."""

    sequence: Sequence
    tokens: list[int]  # new ones; none: it was complete already when its tokens had been computed, as with max_tokens 0
    outcome: Outcome | None  # None: it goes on
