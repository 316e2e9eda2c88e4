"""Speculative decoding from the sequence's own text: draft tokens, and how many of them are worth computing.

Text repeats itself: names, quotations, code, answers about a document. A draft is what followed the same few tokens the
last time. Drafts are computed in the same step as the token that they follow: a step of few rows takes hardly longer
with a few more, as most of its time goes into reading weights. A draft is accepted only if it is the very id that was
sampled for its place, and logits and random numbers are the same bits with and without it; so drafts change speed and
nothing else, and a rejected one cost a row.

Drafts take nothing from other sequences: they use the rows that are left of a tile in a step without prompt chunks, and
the slots that are left in a sequence's last page. K/V that a rejected draft wrote is overwritten before it is read.
"""

from itertools import takewhile

from worker.kv_cache.pages import PagePool
from worker.schedule.policy import SchedulerConfig
from worker.schedule.sequence import TILE, Chunk, Sequence

ROW_COST = 1 / 40  # cost of one more row, as a share of a step
NGRAM_LENGTHS = (3, 1)  # how many last tokens must match, tried in this order
INDEXED_PER_STEP = 1024  # most tokens that are indexed at once: a long prompt is indexed over several steps

INITIAL_ACCEPTANCE = 0.5  # the assumed acceptance rate before anything was drafted
LEARNING_RATE = 1 / 4  # how far one accepted or rejected draft moves the rate
RECOVERY_RATE = 1 / 2048  # how far a step without a worthwhile draft moves it back, so that drafts are tried again


class Speculation:
    """Adds drafts to a step's decodes, at most `config.max_draft_tokens` to one sequence (0: none)."""

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self._config = config
        self._page_size = pool.page_size
        self._rows = min(TILE, config.max_step_tokens)

    def add_drafts(self, decodes: list[Chunk]) -> list[Chunk]:
        """The same decodes, all of a step, with drafts where possible; each has the same share of the free rows."""
        free = self._rows - len(decodes)
        if not self._config.max_draft_tokens or free <= 0:
            return decodes
        cost = ROW_COST * len(decodes)  # the step yields so many tokens, and would yield one more
        extended = []
        for left, chunk in zip(range(len(decodes), 0, -1), decodes, strict=True):
            limit = min(free // left, self._limit(chunk.sequence)) if chunk.samples else 0
            drafts = self._propose(chunk.sequence, limit, cost) if limit > 0 else ()
            extended.append(Chunk(chunk.sequence, chunk.start, 1 + len(drafts), True, drafts) if drafts else chunk)
            free -= len(drafts)
        return extended

    def record(self, chunk: Chunk, accepted: int) -> None:
        self.draft_tokens += len(chunk.drafts)
        self.accepted_tokens += accepted
        if chunk.sequence.drafter is not None:
            chunk.sequence.drafter.record(len(chunk.drafts), accepted)

    def _propose(self, sequence: Sequence, limit: int, cost: float) -> tuple[int, ...]:
        if sequence.drafter is None:
            sequence.drafter = NgramDrafter()
        return sequence.drafter.propose(sequence.tokens, limit, cost)

    def _limit(self, sequence: Sequence) -> int:
        """Most drafts: the step samples one token more than that, which may not exceed the sequence's length."""
        if not sequence.output_len or sequence.in_flight_tokens or not _may_draft(sequence):
            return 0
        length, config = len(sequence.tokens), self._config
        slots = len(sequence.pages) * self._page_size - length
        tokens = min(sequence.sampling.max_tokens - sequence.output_len, config.max_seq_len - length) - 1
        return min(config.max_draft_tokens, slots, tokens)


def accepted_ids(ids: list[int], drafts: tuple[int, ...]) -> list[int]:
    """The sampled ids whose preceding tokens are right: up to the first one that differs from its draft."""
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, drafts, strict=False)))
    return ids[: right + 1]


def without_drafts(chunk: Chunk) -> Chunk:
    """The chunk for a second try: without drafts, of which its sequence gets no more."""
    if not chunk.drafts:
        return chunk
    if chunk.sequence.drafter is not None:
        chunk.sequence.drafter.stop()
    return Chunk(chunk.sequence, chunk.start, chunk.length - len(chunk.drafts), chunk.samples)


def _may_draft(sequence: Sequence) -> bool:
    """Whether its rows can be sampled without knowing the ids of the rows before; and no crash is suspected of it."""
    sampling = sequence.sampling
    independent = sequence.constraint is None and not sampling.penalized and sampling.logprobs is None
    return independent and not sequence.crashes


class NgramDrafter:
    """Drafts for one sequence. Its cost a step does not grow with the sequence, and is tiny while it is wrong."""

    def __init__(self) -> None:
        self._indexes = [NgramIndex(length) for length in NGRAM_LENGTHS]
        self._last = self._indexes[0]  # the index of the last proposal

    def propose(self, tokens: list[int], limit: int, cost: float) -> tuple[int, ...]:
        for index in self._indexes:
            count = index.draft_length(limit, cost)
            position = index.find(tokens) if count else None
            if position is not None:
                self._last = index
                following = tokens[position : position + count]
                return tuple((following * count)[:count])  # where that is shorter, it is repeated
        return ()

    def record(self, drafted: int, accepted: int) -> None:
        self._last.record(accepted, rejected=accepted < drafted)

    def stop(self) -> None:
        self._indexes = []


class NgramIndex:
    """Maps every `length` tokens in a row to the position after their last occurrence; knows its acceptance rate."""

    def __init__(self, length: int) -> None:
        self.acceptance = INITIAL_ACCEPTANCE
        self._length = length
        self._next = length  # the next position to be indexed
        self._after: dict[tuple[int, ...], int] = {}  # the position behind an n-gram

    def find(self, tokens: list[int]) -> int | None:
        """The position in `tokens` of what followed its last n-gram before; `tokens` only ever grow."""
        length = self._length
        for position in range(self._next, min(len(tokens), self._next + INDEXED_PER_STEP)):
            self._after[tuple(tokens[position - length : position])] = position
            self._next = position + 1
        return self._after.get(tuple(tokens[-length:]))

    def draft_length(self, limit: int, cost: float) -> int:
        """How many tokens to draft: a draft is worth it if its probability of being accepted is above `cost`."""
        count, probability = 0, self.acceptance
        while count < limit and probability > cost:
            count += 1
            probability *= self.acceptance  # it is accepted only if all before it are
        if not count:
            self.acceptance += (INITIAL_ACCEPTANCE - self.acceptance) * RECOVERY_RATE
        return count

    def record(self, accepted: int, *, rejected: bool) -> None:
        for _ in range(accepted):
            self.acceptance += (1 - self.acceptance) * LEARNING_RATE
        if rejected:
            self.acceptance -= self.acceptance * LEARNING_RATE
