"""Drafts: tokens that are guessed, and computed in the same step as the token that they are guessed to follow.

A step of few rows takes hardly longer with a few more, as most of its time goes into reading weights. A draft is kept
only if it is the very id that was sampled for its place, where the logits' bits and the random numbers are those that
they would have been without it: so drafts show in speed and in nothing else, and one in vain cost a row.

They take nothing from anybody: they have the rows that are left of a tile in a step that computes no prompt, and the
slots that are left in a sequence's last page. What a refused one wrote there is written over before it is read.
"""

from worker.schedule.ngram import NgramDrafter
from worker.schedule.plan import TILE, Chunk
from worker.schedule.sequence import Sequence
from worker.schedule.state import State

ROW = 1 / 40  # what one more of them costs, as a share of a step


class Speculation:
    """Adds them to the decodes of a step; `config.max_draft_tokens` for one sequence at most, 0: never any."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._most = state.config.max_draft_tokens
        self._rows = min(TILE, state.config.max_step_tokens)

    def extend(self, decodes: list[Chunk]) -> list[Chunk]:
        """The same decodes, all of a step, those that can with drafts; each has the same share of the rows left."""
        spare = self._rows - len(decodes)
        if not self._most or spare <= 0:
            return decodes
        price = ROW * len(decodes)  # the step brings so many tokens, and would bring one more
        extended = []
        for left, chunk in zip(range(len(decodes), 0, -1), decodes, strict=True):
            most = min(spare // left, self._room(chunk.sequence)) if chunk.samples else 0
            drafts = _drafter(chunk.sequence).propose(chunk.sequence.tokens, most, price) if most > 0 else ()
            extended.append(Chunk(chunk.sequence, chunk.start, 1 + len(drafts), True, drafts) if drafts else chunk)
            spare -= len(drafts)
        return extended

    def _room(self, sequence: Sequence) -> int:
        """How many it may have: the step samples one token more than that, which may not exceed its length."""
        if not sequence.output_len or sequence.in_flight_tokens or not _independent(sequence):
            return 0
        length, config = len(sequence.tokens), self._state.config
        slots = len(sequence.pages) * self._state.paging.pool.page_size - length
        tokens = min(sequence.sampling.max_tokens - sequence.output_len, config.max_seq_len - length) - 1
        return min(self._most, slots, tokens)


def _independent(sequence: Sequence) -> bool:
    """Whether its rows need nothing that is known only once those before them are sampled; and it is no suspect."""
    sampling = sequence.sampling
    free = sequence.constraint is None and not sampling.penalized and sampling.logprobs is None
    return free and not sequence.crashes


def _drafter(sequence: Sequence) -> NgramDrafter:
    if sequence.drafter is None:
        sequence.drafter = NgramDrafter()
    return sequence.drafter
