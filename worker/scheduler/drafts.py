"""Speculative decoding: proposes draft tokens from the text of the sequence itself, if they are worth computing.

Text repeats itself: names, quotations, code, answers about a document. The drafts are the tokens that followed the last
occurrence of the same few tokens. They are computed in the same step as the token before them. A step of few rows
takes hardly longer with a few more rows, because most of its time goes into reading weights. A draft is accepted only
if it equals the id that is sampled for its position, and the bits of logits and random numbers do not depend on drafts.
Drafts therefore change only the speed, and a rejected draft costs one row.

Drafts take nothing from other sequences: they use the free rows of a tile in a step without prompt chunks, and the free
slots in the last page of a sequence. K/V that a rejected draft has written is overwritten before it is read.

A recurrent state cannot be overwritten in part. After a rejected draft, the next step starts from the same state as the
failed one and computes the accepted tokens again; it may have drafts, too. The cost of a draft includes the rows that
its rejection would repeat, so sequences with a recurrent state get fewer drafts.
"""

from typing import TYPE_CHECKING, Protocol

from worker.schedule.policy import SchedulerConfig
from worker.schedule.row_costs import RowCosts
from worker.schedule.sequence import TILE, Chunk, Sequence

if TYPE_CHECKING:
    from worker.schedule.features.states import States
    from worker.schedule.features.waiting_drafts import Experience, Proposer

NGRAM_LENGTHS = (3, 1)  # how many last tokens must match, tried in this order
MOST_DRAFTS = TILE - 1  # per sequence and step: one row of the tile is for the token before the drafts
INDEXED_PER_STEP = 1024  # at most this many tokens are indexed at once: a long prompt takes several steps

# A draft must be worth this many times its cost, because the highest of many estimates is usually too high.
MARGIN = 1.2
INITIAL_ACCEPTANCE = 0.2  # the acceptance rate that is assumed before the first draft
LEARNING_RATE = 1 / 8  # how far one accepted or rejected draft moves the acceptance rate
RECOVERY_RATE = 1 / 2048  # how far a step without a worthwhile draft moves this rate back, to try drafts again


class Drafter(Protocol):
    """Proposes draft tokens for one sequence."""

    def propose(self, tokens: list[int], limit: int, cost: float, repeats: int = 0) -> tuple[int, ...]:
        """Returns at most `limit` tokens that may follow `tokens`. Between calls, `tokens` may only grow.

        cost: the cost of one row, as a share of what an accepted draft saves. repeats: how many rows the next step
        computes again if the first draft is rejected.
        """

    def record(self, drafted: int, accepted: int) -> None:
        """Notes how many tokens of the last proposal were computed as drafts, and how many of these were accepted."""

    def stop(self) -> None:
        """Makes propose() return no tokens from now on."""


class Speculation:
    """Adds drafts to the decodes of a step, at most `config.max_draft_tokens` per sequence."""

    def __init__(self, config: SchedulerConfig, states: "States | None" = None) -> None:
        """states: gives slots for recurrent states; None if no layer has a recurrent state."""
        self._states = states
        self.proposer: Proposer | None = None  # runs the draft model, if there is one
        self._experience: Experience | None = None  # the draft model's acceptance in earlier sequences
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.drafted_at = [0] * MOST_DRAFTS  # counts of drafts by their index among the drafts of a chunk
        self.accepted_at = [0] * MOST_DRAFTS  # counts of accepted drafts by the same index
        self.drafters: dict[Sequence, Drafter] = {}  # the drafter of each sequence, until the sequence leaves
        self._config = config
        self._rows = min(TILE, config.max_step_tokens)

    def may_draft(self, prefills: list[Chunk]) -> bool:
        """Whether a step with these prefill chunks may have drafts.

        True if the chunks together are shorter than a tile and only compute output again.
        """
        short = sum([chunk.length for chunk in prefills]) < self._rows
        return short and all(one.start >= one.sequence.prompt_len and one.sequence.check is None for one in prefills)

    def add_drafts(self, decodes: list[Chunk], costs: RowCosts) -> list[Chunk]:
        """Returns the decodes, with drafts where drafts pay. Each decode may use the same share of the free rows.

        decodes: all chunks of the step. costs: the measured costs of one more row and of a draft model's drafts.
        """
        free = self._rows - sum([chunk.length for chunk in decodes])
        if free <= 0 or not decodes:
            return decodes
        cost = MARGIN * costs(len(decodes)) * len(decodes)  # in units of the step's time per decode
        if self.proposer is not None:
            self._ask_model(self.proposer, decodes, free // len(decodes), cost, costs)
        extended = []
        for left, chunk in zip(range(len(decodes), 0, -1), decodes, strict=True):
            limit = min(free // left, self._limit(chunk)) if chunk.samples else 0
            drafts = self._propose(chunk, limit, cost) if limit > 0 else ()
            length = chunk.length + len(drafts)
            extended.append(Chunk(chunk.sequence, chunk.start, length, True, drafts) if drafts else chunk)
            free -= len(drafts)
        return extended

    def record(self, chunk: Chunk, accepted: int) -> None:
        self.draft_tokens += len(chunk.drafts)
        self.accepted_tokens += accepted
        chunk.sequence.history.drafted += len(chunk.drafts)
        chunk.sequence.history.accepted += accepted
        for at in range(len(chunk.drafts)):
            self.drafted_at[at] += 1
            self.accepted_at[at] += at < accepted
        if chunk.sequence in self.drafters:
            self.drafters[chunk.sequence].record(len(chunk.drafts), accepted)

    def failed(self, sequence: Sequence) -> None:
        """Notes that a step with drafts of this sequence has failed. The sequence gets no more drafts."""
        if sequence in self.drafters:
            self.drafters[sequence].stop()

    def forget(self, sequence: Sequence) -> None:
        """Forgets the drafter of a sequence that has ended."""
        self.drafters.pop(sequence, None)
        if self.proposer is not None:
            self.proposer.forget(sequence)

    def _ask_model(self, proposer: "Proposer", decodes: list[Chunk], share: int, cost: float, costs: RowCosts) -> None:
        """Lets the draft model propose tokens for all decodes at once. The drafters keep them until _propose()."""
        from worker.schedule.features.waiting_drafts import WaitingDrafts, ask

        wanted, of_model = [], cost + MARGIN * costs.of_proposals(len(decodes))
        for chunk in decodes:
            drafter = self._drafter(chunk.sequence)
            limit = min(share, self._limit(chunk)) if chunk.samples else 0
            if limit > 0 and isinstance(drafter, WaitingDrafts):
                count = drafter.wanted(chunk.sequence.tokens, limit, cost, of_model, self._repeats(chunk))
                wanted += [(chunk.sequence, drafter, count)] if count else []
        if wanted:
            ask(proposer, wanted)
            first = any(not drafter.tried for _, drafter, _ in wanted)
            costs.proposed(len(decodes), max(count for _, _, count in wanted), proposer.seconds, first=first)

    def _propose(self, chunk: Chunk, limit: int, cost: float) -> tuple[int, ...]:
        drafter = self._drafter(chunk.sequence)
        return drafter.propose(chunk.sequence.tokens, limit, cost, self._repeats(chunk))

    def _drafter(self, sequence: Sequence) -> Drafter:
        drafter = self.drafters.get(sequence)
        if drafter is None:
            drafter = self.drafters[sequence] = self._new_drafter(sequence)
        return drafter

    def _new_drafter(self, sequence: Sequence) -> Drafter:
        if sequence.prediction is not None:
            from worker.schedule.features.predicted import PredictedDrafter

            return PredictedDrafter(sequence.prediction, sequence.prompt_len)
        if self.proposer is None:
            return NgramDrafter()
        from worker.schedule.features.waiting_drafts import Experience, WaitingDrafts

        self._experience = self._experience or Experience()
        return WaitingDrafts(self._experience, NgramDrafter())

    def _repeats(self, chunk: Chunk) -> int:
        return 0 if self._states is None else chunk.length

    def _limit(self, chunk: Chunk) -> int:
        """Returns how many drafts a sequence may have in this step.

        The step samples one token more than the sequence has drafts, and all these tokens must fit in the maximum
        length. The chunk must not pass a position where a recurrent state is published.
        """
        sequence = chunk.sequence
        if not sequence.output_len or sequence.in_flight_tokens or not _may_draft(sequence):
            return 0
        length, config = len(sequence.tokens), self._config
        tokens = min(sequence.sampling.max_tokens - sequence.output_len, config.max_seq_len - length) - 1
        most = config.max_draft_tokens if sequence.prediction is None else MOST_DRAFTS
        checkpoint = 0 if self._states is None else self._states.next_checkpoint(sequence, chunk.start)
        if checkpoint:
            most = min(most, checkpoint - length)
        return min(most, sequence.room - length, tokens)


def _may_draft(sequence: Sequence) -> bool:
    """Whether the sequence may have drafts.

    True if each row can be sampled without knowing the ids of earlier rows, and the sequence is not suspected of having
    crashed a worker.
    """
    sampling = sequence.sampling
    independent = sequence.constraint is None and not sampling.penalized and sampling.logprobs is None
    independent = independent and sampling.chain is None
    return independent and not sequence.history.crashes


class NgramDrafter:
    """Proposes drafts from the text of a sequence. The cost per step does not grow with the length of the sequence."""

    def __init__(self) -> None:
        self._indexes = [NgramIndex(length) for length in NGRAM_LENGTHS]
        self._last = self._indexes[0]  # the index that made the last proposal

    def propose(self, tokens: list[int], limit: int, cost: float, repeats: int = 0) -> tuple[int, ...]:
        return self.propose_above(0.0, tokens, limit, cost, repeats)

    def propose_above(self, least: float, tokens: list[int], limit: int, cost: float, repeats: int) -> tuple[int, ...]:
        """Returns the drafts that gain more than `least` tokens in a step (see Acceptance.gain), or () if none do."""
        for index in self._indexes:
            position = index.find(tokens)
            count = index.draft_length(limit, cost, repeats) if position is not None else 0
            if position is not None and count and index.gain(count, cost) > least:
                self._last = index
                following = tokens[position : position + count]
                return tuple((following * count)[:count])  # if the text that follows is too short, it is repeated
            index.watch(len(tokens), position)
        return ()

    def record(self, drafted: int, accepted: int) -> None:
        self._last.record(accepted, rejected=accepted < drafted)

    def stop(self) -> None:
        self._indexes = []


class Acceptance:
    """Tracks how often drafts of one kind are accepted.

    usual: the acceptance rate that steps without drafts slowly return to. first: the initial rate; None: `usual`.
    """

    def __init__(self, usual: float = INITIAL_ACCEPTANCE, first: float | None = None) -> None:
        self.acceptance = usual if first is None else first
        self._usual = usual

    def draft_length(self, limit: int, cost: float, repeats: int = 0) -> int:
        """Returns how many tokens to draft. A draft is worth it if the step then yields more tokens per second.

        The cost of a draft is the cost of its row. Where a rejection repeats rows, it also includes the cost of the
        repeated rows (the drafts before it, too), times the probability that this draft is the first rejected one.
        """
        count, probability = 0, self.acceptance
        tokens = time = 1.0  # tokens and time of a step with the drafts so far, relative to a step without drafts
        while count < limit:
            first_rejected = probability * (1 / self.acceptance - 1) if repeats else 0.0
            longer = cost * (1 + first_rejected * (repeats + count))
            if (tokens + probability) / (time + longer) <= tokens / time:
                break
            count, tokens, time = count + 1, tokens + probability, time + longer
            probability *= self.acceptance  # a draft is accepted only if all drafts before it are
        if not count:
            self.acceptance += (self._usual - self.acceptance) * RECOVERY_RATE
        return count

    def gain(self, count: int, cost: float) -> float:
        """Returns how many tokens `count` drafts are expected to add to a step, less their cost."""
        return sum([self.acceptance**at - cost for at in range(1, count + 1)])

    def record(self, accepted: int, *, rejected: bool, rate: float = LEARNING_RATE) -> None:
        for _ in range(accepted):
            self.acceptance += (1 - self.acceptance) * rate
        if rejected:
            self.acceptance -= self.acceptance * rate


class NgramIndex(Acceptance):
    """Maps each n-gram of `length` tokens to the position after its last occurrence."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self._watched: tuple[int, int] | None = None  # (place, position) of the guess that watch() noted last
        self._next = length  # the next position to be indexed
        self._after: dict[tuple[int, ...], int] = {}  # n-gram → the position after it

    def watch(self, place: int, position: int | None) -> None:
        """Notes a guess that is not drafted: the next token, at `place`, will equal the token at `position`.

        find() later compares both tokens, which costs nothing. Drafts begin once enough such guesses were right.
        """
        self._watched = None if position is None else (place, position)

    def find(self, tokens: list[int]) -> int | None:
        """Returns the position after the previous occurrence of the last n-gram of `tokens`, or None.

        Between calls, `tokens` may only grow.
        """
        if self._watched is not None and self._watched[0] < len(tokens):
            place, position = self._watched
            right = tokens[place] == tokens[position]
            self.record(int(right), rejected=not right)
            self._watched = None
        length = self._length
        for position in range(self._next, min(len(tokens), self._next + INDEXED_PER_STEP)):
            self._after[tuple(tokens[position - length : position])] = position
            self._next = position + 1
        return self._after.get(tuple(tokens[-length:]))
