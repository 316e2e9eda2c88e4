"""Speculative decoding: proposes draft tokens from the text of the sequence itself, if they are worth computing.

Text repeats itself: names, quotations, code, answers about a document. The drafts are the tokens that followed the last
occurrence of the same few tokens. They are computed in the same step as the token before them. A step of few rows
takes hardly longer with a few more rows, because most of its time goes into reading weights. A draft is accepted only
if it equals the id that is sampled for its position, and the bits of logits and random numbers do not depend on drafts.
Drafts therefore change only the speed, and a rejected draft costs one row.

The row after a draft is sampled as if the draft were a token of the output: penalties and samplers count it, and
grammars and rules mask the row with a copy of their state that has accepted it. Drafts that a rule forbids are not
computed. Ids that a rule forces are drafts themselves, and the drafter proposes what follows them. What the host takes
for such a row is a part of its cost. Copies of a hostile grammar's state and the ids that it forces take up to a tenth
of a second. A tenant with such a grammar gets no drafts under grammars while there are other tenants, and a step looks
for drafts under grammars for STEP_S at most.

Drafts take nothing from other sequences: they use the free rows of a tile in a step without prompt chunks, and the free
slots in the last page of a sequence. K/V that a rejected draft has written is overwritten before it is read.

A recurrent state cannot be overwritten in part. After a rejected draft, the next step starts from the same state as the
failed one and computes the accepted tokens again; it may have drafts, too. The cost of a draft includes the rows that
its rejection would repeat, so sequences with a recurrent state get fewer drafts.
"""

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from shared.sandbox import SLOW_S, SlowTenants
from worker.kv_cache.recent_texts import Scope, ScopedTexts
from worker.scheduler.host_budget import HEAVY_S, STEP_S, decodes_host_s
from worker.scheduler.ngrams import LEARNING_RATE, Acceptance, NgramDrafter
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.sequence import TILE, Chunk, Constraint, Ids, Prediction, Sequence
from worker.scheduler.step_time import RowCosts

if TYPE_CHECKING:
    from worker.scheduler.recurrent_slots import States


MOST_DRAFTS = TILE - 1  # per sequence and step: one row of the tile is for the token before the drafts
# A draft must be worth this many times its cost, because the highest of many estimates is usually too high.
MARGIN = 1.2


class Drafter(Protocol):
    """Proposes draft tokens for one sequence."""

    def propose(self, tokens: list[int], limit: int, cost: float, repeats: int = 0, ahead: Ids = ()) -> Ids:
        """Returns at most `limit` tokens that may follow `tokens` and `ahead`. Between calls, `tokens` may only grow.

        cost: the cost of one row, as a share of what an accepted draft saves. repeats: how many rows the next step
        computes again if the first draft is rejected. ahead: ids that a rule forces to follow `tokens`.
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
        # Without a prefix cache, requests leave no trace in the speed of others; so they do here.
        self.texts = ScopedTexts() if config.prefix_cache else None
        self._slow = SlowTenants(HEAVY_S)  # for whose grammars the drafts took long to find
        self._shared_at = -math.inf  # when a step had rows of several tenants last
        self._config = config
        self._rows = min(TILE, config.max_step_tokens)

    def may_draft(self, prefills: list[Chunk]) -> bool:
        """Whether a step with these prefill chunks may have drafts.

        True if the chunks together are shorter than a tile and only compute output again.
        """
        short = sum([chunk.length for chunk in prefills]) < self._rows
        return short and all(one.start >= one.sequence.prompt_len and one.sequence.check is None for one in prefills)

    def add_drafts(
        self, decodes: list[Chunk], costs: RowCosts, *, crowded: bool = False, most: float = math.inf
    ) -> list[Chunk]:
        """Returns the decodes, with drafts where drafts pay. Each decode may use the same share of the free rows.

        decodes: all chunks of the step. costs: the measured costs of one more row and of a draft model's drafts.
        crowded: whether rows with heavy masks have no drafts, because of other tenants. most: tokens of the step
        """
        free = int(min(self._rows, most)) - sum([chunk.length for chunk in decodes])
        if free <= 0 or not decodes:
            return decodes
        cost = MARGIN * costs(len(decodes)) * len(decodes)  # in units of the step's time per decode
        if self.proposer is not None:
            self._ask_model(self.proposer, decodes, free // len(decodes), cost, costs)
        if len({chunk.sequence.turn.tenant for chunk in decodes}) > 1:
            self._shared_at = time.monotonic()
        shared = time.monotonic() - self._shared_at < SLOW_S  # the others may be between two requests
        extended, host_s, searched_s = [], STEP_S - decodes_host_s(decodes), 0.0
        for left, chunk in zip(range(len(decodes), 0, -1), decodes, strict=True):
            limit, own_cost = min(free // left, self._limit(chunk)) if chunk.samples else 0, cost
            if limit > 0 and chunk.sequence.host is not None and (row_s := chunk.sequence.host.row):
                own_cost += MARGIN * costs.of_host(len(decodes), row_s) * len(decodes)
                limit = 0 if crowded and chunk.sequence.host.heavy else min(limit, int(host_s / left / row_s))
                host_s -= limit * row_s
            if chunk.sequence.constraint is not None:
                slow = shared and chunk.sequence.turn.tenant in self._slow
                limit = 0 if slow or searched_s > STEP_S else limit
            if limit > 0:
                began = time.thread_time()
                chunk = self._with_drafts(chunk, limit, own_cost)
                if chunk.sequence.constraint is not None:
                    searched_s += (seconds := time.thread_time() - began)
                    self._slow.note(chunk.sequence.turn.tenant, seconds)
                free -= len(chunk.drafts)
            extended.append(chunk)
        return extended

    def record(self, chunk: Chunk, accepted: int) -> None:
        self.draft_tokens += len(chunk.drafts)
        self.accepted_tokens += accepted
        chunk.sequence.history.drafted += len(chunk.drafts)
        chunk.sequence.history.accepted += accepted
        for at in range(len(chunk.drafts)):
            self.drafted_at[at] += 1
            self.accepted_at[at] += at < accepted
        drafted = len(chunk.drafts) - sum(chunk.forced)
        if drafted and accepted >= chunk.forced[0] and chunk.sequence in self.drafters:
            self.drafters[chunk.sequence].record(drafted, min(accepted - chunk.forced[0], drafted))

    def failed(self, sequence: Sequence) -> None:
        """Notes that a step with drafts of this sequence has failed. The sequence gets no more drafts."""
        if sequence in self.drafters:
            self.drafters[sequence].stop()

    def forget(self, sequence: Sequence) -> None:
        """Forgets the drafter of a sequence that has ended, and keeps the sequence's text for later ones."""
        self.drafters.pop(sequence, None)
        if self.texts is not None and sequence.output_len and sequence.check is None:
            self.texts.add(_scope(sequence), sequence.tokens)
        if self.proposer is not None:
            self.proposer.forget(sequence)

    def _ask_model(self, proposer: "Proposer", decodes: list[Chunk], share: int, cost: float, costs: RowCosts) -> None:
        """Lets the draft model propose tokens for all decodes at once. The drafters keep them until _propose()."""

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

    def _with_drafts(self, chunk: Chunk, limit: int, cost: float) -> Chunk:
        """Returns a decode with at most `limit` drafts, for which it has the room."""
        sequence, forced = chunk.sequence, (0, 0)
        if sequence.constraint is None:
            drafts = self._propose(chunk, limit, cost)
        else:
            drafts, forced = self._allowed(chunk, sequence.constraint, limit, cost)
        length = chunk.length + len(drafts)
        return Chunk(sequence, chunk.start, length, True, drafts, forced) if drafts else chunk

    def _allowed(self, chunk: Chunk, constraint: Constraint, limit: int, cost: float) -> tuple[Ids, tuple[int, int]]:
        """Returns drafts that the constraint allows, and how many of the first and of the last ones it forces.

        An id that it forces is sampled for certain, so it is worth its row unless a row costs as much as a step.
        """
        sure = limit if cost < 1 else 0
        state, first = _forced(constraint, sure)
        drafts = self._propose(chunk, limit - len(first), cost, first) if len(first) < limit else ()
        state, count = state.after(drafts)
        if drafts and not count and isinstance(drafter := self._drafter(chunk.sequence), WaitingDrafts):
            drafter.record(1, 0)  # a draft model that knows nothing of the rule is asked less often
        last = _forced(state, sure - len(first) - count)[1]
        return (*first, *drafts[:count], *last), (len(first), len(last))

    def _propose(self, chunk: Chunk, limit: int, cost: float, ahead: Ids = ()) -> Ids:
        drafter = self._drafter(chunk.sequence)
        return drafter.propose(chunk.sequence.tokens, limit, cost, self._repeats(chunk), ahead)

    def _drafter(self, sequence: Sequence) -> Drafter:
        drafter = self.drafters.get(sequence)
        if drafter is None:
            drafter = self.drafters[sequence] = self._new_drafter(sequence)
        return drafter

    def _new_drafter(self, sequence: Sequence) -> Drafter:
        text = NgramDrafter(None if self.texts is None else self.texts.of(_scope(sequence)))
        if sequence.prediction is not None:
            return PredictedDrafter(sequence.prediction, sequence.prompt_len, text)
        if self.proposer is None:
            return text

        self._experience = self._experience or Experience()
        return WaitingDrafts(self._experience, text)

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
        return min(most, sequence.capacity - length, tokens)


def _scope(sequence: Sequence) -> Scope:
    return sequence.turn.tenant, sequence.prefix.salt


def _may_draft(sequence: Sequence) -> bool:
    """Whether the sequence may have drafts.

    False with Mirostat, whose state after a row depends on the probability that the row's token was drawn with, so that
    rejected rows would leave a trace; and if the sequence is suspected of having crashed a worker.
    """
    return sequence.mirostat is None and not sequence.history.crashes


def _forced(constraint: Constraint, limit: int) -> tuple[Constraint, Ids]:
    """Returns a copy of the constraint after the ids that it forces, and these ids, at most `limit`.

    Only copies are asked, because the constraint itself may change only when an id is accepted.
    """
    state, _ = constraint.after(())
    ids = state.forced(limit) if limit > 0 and not state.ended else ()
    if not ids:
        return state, ()
    state, count = constraint.after(ids)
    return state, ids[:count]


# Drafts from a text that the client expects as the output (`prediction`), such as a file in which few words change.
#
# The drafter follows the output through the predicted text and proposes the tokens that come next there. Where the
# output differs from the prediction, the last output tokens are looked up in the prediction, to find the place again.
# While no place is found, NgramDrafter proposes drafts from the text of the sequence itself.

EXPECTED_ACCEPTANCE = 0.7  # the acceptance rate that is assumed before the first draft
LONGEST_MATCH, SHORTEST_MATCH = 4, 2  # numbers of last output tokens to look up in the prediction, the longest first


class PredictedDrafter:
    """Proposes the next tokens of the predicted text. Implements Drafter."""

    def __init__(self, prediction: Prediction, output: int, other: Drafter | None = None) -> None:
        """output: the index of the first output token in the sequence's tokens. other: proposes where the output has
        left the predicted text."""
        self._prediction, self._ids = prediction, prediction.ids
        self._acceptance = Acceptance(EXPECTED_ACCEPTANCE)
        self._other: Drafter = other or NgramDrafter()
        self._place: int | None = 0  # the index in the predicted text of the next output token; None: not known
        self._read = output  # tokens before this index have been matched already
        self._begin = output
        self._own = False  # whether the last proposal came from the predicted text
        self._stopped = False
        self._after = {length: _places(self._ids, length) for length in range(SHORTEST_MATCH, LONGEST_MATCH + 1)}

    def propose(self, tokens: list[int], limit: int, cost: float, repeats: int = 0, ahead: Ids = ()) -> Ids:
        """Finds the place of the output in the prediction, then proposes the next tokens there. See Drafter."""
        if self._stopped:
            return ()
        self._follow(tokens)
        place = self._place
        if place is not None and ahead:
            place = place + len(ahead) if tuple(self._ids[place : place + len(ahead)]) == ahead else None
        self._own = place is not None and place < len(self._ids)
        if place is None or not self._own:
            return self._other.propose(tokens, limit, cost, repeats, ahead)
        return tuple(self._ids[place : place + self._acceptance.draft_length(limit, cost, repeats)])

    def record(self, drafted: int, accepted: int) -> None:
        if not self._own:
            self._other.record(drafted, accepted)
            return
        self._prediction.accepted += accepted
        self._prediction.rejected += drafted - accepted
        self._acceptance.record(accepted, rejected=accepted < drafted)

    def stop(self) -> None:
        self._stopped = True

    def _follow(self, tokens: list[int]) -> None:
        for at in range(self._read, len(tokens)):
            place = self._place
            if place is not None and place < len(self._ids) and self._ids[place] == tokens[at]:
                self._place = place + 1
            else:
                self._place = self._found(tokens, at + 1, place or 0)
        self._read = len(tokens)

    def _found(self, tokens: list[int], end: int, before: int) -> int | None:
        """Looks up the tokens before `end` in the prediction. Returns the index after the match, or None.

        If there are several matches, the first that ends at `before` or later counts, or else the first of all.
        """
        for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
            if end - length < self._begin:
                continue
            places = self._after[length].get(tuple(tokens[end - length : end]), ())
            if places:
                return next((place for place in places if place >= before), places[0])
        return None


def _places(ids: list[int], length: int) -> dict[Ids, list[int]]:
    """Maps each run of `length` tokens in the text to the positions after it, in ascending order."""
    found: dict[Ids, list[int]] = {}
    for end in range(length, len(ids) + 1):
        found.setdefault(tuple(ids[end - length : end]), []).append(end)
    return found


# Keeps the drafts of a draft model until they are planned, because the model proposes them for all sequences at once.
#
# The number of drafts depends on the measured acceptance and on the measured times of a step and of the draft model.
# A draft model that is too slow for its acceptance is asked for fewer drafts, down to none. Where the text repeats
# itself, the drafts are taken from the text if these are expected to gain more.

INITIAL_MODEL_ACCEPTANCE = 0.6  # assumed acceptance rate: a model's drafts are right more often than NgramDrafter's
PROBE_EVERY = 24  # steps until a sequence without drafts gets one again, if drafts are accepted in other sequences
RESULTS = 32  # a sequence's first rate is the mean of about this many results of earlier sequences


class Proposer(Protocol):
    """Runs a draft model (worker/spec_decode/)."""

    @property
    def seconds(self) -> float:
        """The duration of the last propose()."""

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[Ids]:
        """Returns drafts for each sequence. wanted: sequences, each with the maximum number of its drafts."""

    def forget(self, target: Sequence) -> None:
        """Frees the memory of a sequence that has ended."""

    def capture_graphs(self, on_progress: Callable[[], None]) -> None:
        """Captures CUDA graphs before serving, if the draft model has any."""


class Experience:
    """The draft model's acceptance in earlier sequences: how often the first draft of a step was accepted.

    If the draft model is useless for a task, new sequences of this task need not find that out again.
    """

    def __init__(self) -> None:
        self._acceptance = INITIAL_MODEL_ACCEPTANCE

    @property
    def acceptance(self) -> float:
        return self._acceptance

    def begin(self) -> float:
        """Returns the acceptance rate for a new sequence. Each call raises a low rate: a bad model is tried again."""
        expected = self._acceptance
        self._acceptance += (INITIAL_MODEL_ACCEPTANCE - expected) / RESULTS
        return expected

    def record(self, *, accepted: bool) -> None:
        self._acceptance += (accepted - self._acceptance) / RESULTS


class WaitingDrafts:
    """The drafts of one sequence. Implements Drafter.

    A sequence begins with one draft per step, and gets more only after drafts are accepted. The first results count
    more than later ones. A useless draft model therefore costs little time. If a good model's first drafts for a
    sequence were wrong, it is tried again from time to time.
    """

    def __init__(self, experience: Experience, text: NgramDrafter | None = None) -> None:
        """text: also proposes drafts, from the sequence's own text."""
        self._text = text
        self._of_text = False  # whether the waiting (or, if none wait, the last) drafts came from the text
        self.waiting: Ids = ()
        self._experience = experience
        self._acceptance = Acceptance(INITIAL_MODEL_ACCEPTANCE, experience.begin())
        self._accepted = self._results = self._steps = 0
        self._stopped = False

    @property
    def tried(self) -> bool:
        """Whether drafts of the draft model have been computed for this sequence."""
        return self._results > 0

    def wanted(self, tokens: list[int], limit: int, text_cost: float, cost: float, repeats: int) -> int:
        """Returns how many drafts are worth asking the draft model for: 0 if drafts from the text promise more.

        text_cost: the cost of a draft from the text. cost: the cost of a draft from the model.
        """
        if self._stopped:
            return 0
        self._steps += 1
        count = self._acceptance.draft_length(min(limit, 1 + self._accepted), cost, repeats)
        if not count and self._steps % PROBE_EVERY == 0 and self._experience.acceptance > cost:
            count = 1
        if self._text is not None:
            least = self._acceptance.gain(count, cost)
            self.waiting = self._text.propose_above(least, tokens, limit, text_cost, repeats)
        self._of_text = bool(self.waiting)
        return 0 if self._of_text else count

    def propose(self, tokens: list[int], limit: int, cost: float, repeats: int = 0, ahead: Ids = ()) -> Ids:
        """Returns the waiting drafts. wanted() was called before with the same tokens, but without `ahead`."""
        drafts, self.waiting = self.waiting, ()
        return drafts[len(ahead) :][:limit] if drafts[: len(ahead)] == ahead else ()

    def record(self, drafted: int, accepted: int) -> None:
        if self._text is not None and self._of_text:
            self._text.record(drafted, accepted)
            return
        self._accepted += accepted
        self._results += 1
        self._experience.record(accepted=accepted > 0)
        rate = max(LEARNING_RATE, 1 / (1 + self._results))  # a plain mean of the first results, then LEARNING_RATE
        self._acceptance.record(accepted, rejected=accepted < drafted, rate=rate)

    def stop(self) -> None:
        self._stopped = True


def ask(proposer: Proposer, wanted: Seq[tuple[Sequence, WaitingDrafts, int]]) -> None:
    """Asks the draft model for drafts, and gives them to the drafters. wanted: (sequence, its drafter, most drafts)."""
    proposed = proposer.propose([(sequence, count) for sequence, _, count in wanted])
    for (_, drafter, _), drafts in zip(wanted, proposed, strict=True):
        drafter.waiting = drafts
