"""The data of the scheduler: a sequence (a request inside the worker), a planned step, and the results of a step.

This is plain data, without policies, queues, tensors or clocks.
"""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from shared.messages import Outcome, Pooling, Sampling
from worker.schedule.records.adjustment import Adjustment, adjustment
from worker.schedule.records.history import History
from worker.schedule.records.shared_prefix import SharedPrefix
from worker.schedule.records.turn import Turn

if TYPE_CHECKING:  # features, which are imported at run time only when needed
    from worker.schedule.records.adapter_use import AdapterUse
    from worker.schedule.records.answer_check import AnswerCheck
    from worker.schedule.records.constraint import Constraint
    from worker.schedule.records.host_work import HostWork
    from worker.schedule.records.mirostat import MirostatRecord
    from worker.schedule.records.pictures import PromptPictures
    from worker.schedule.records.prediction import Prediction
    from worker.schedule.records.prompt_scores import PromptScores
    from worker.schedule.records.sequence_states import SequenceStates

TILE = 16  # a matrix multiplication computes this many rows at once

Key = tuple[bytes, int]  # (frontend id, request id)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the scheduler.

    `tokens` is prompt + output. The first `computed_tokens` of them have K/V in `pages`; the others have none yet.
    Each group of layers (worker/kv_cache/groups.py) has pages of its own. The pages behind the group's window have been
    returned, and their entries are the scratch page.

    There is no state field. A waiting sequence has no pages. A running sequence with more than one uncomputed token is
    in prefill, and with exactly one in decode. The data of each feature is in a record of its own, which is None for a
    request without the feature.
    """

    # the request
    key: Key
    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    seed: int

    # progress
    computed_tokens: int = 0  # tokens with K/V, not counting steps in flight
    in_flight_tokens: int = 0  # how many further tokens steps in flight compute
    pending_outputs: int = 0  # the number of ids that steps in flight will sample, not counting accepted drafts

    # memory
    pages: "list[array[int]]" = field(default_factory=list)  # page numbers, one array of C ints per group
    room: int = 0  # how many tokens the pages of all groups have slots for

    # the sequence's place in the queue, its history, and the prefix that it shares with other sequences
    turn: Turn = field(default_factory=Turn)
    history: History = field(default_factory=History)
    prefix: SharedPrefix = field(default_factory=SharedPrefix)

    # features
    constraint: "Constraint | None" = None  # a grammar, or rules about tokens
    adjustment: Adjustment | None = field(init=False)  # penalties, biases and min_tokens
    check: "AnswerCheck | None" = None  # an answer that the output is compared with
    scores: "PromptScores | None" = None  # which prompt tokens get log-probabilities (`prompt_logprobs`)
    pooling: Pooling | None = None  # the result is a vector and nothing is sampled (worker/run/pooling.py)
    states: "SequenceStates | None" = None  # slots of recurrent states, if layers have any
    mirostat: "MirostatRecord | None" = None  # the state of the Mirostat sampler
    adapter: "AdapterUse | None" = None  # a LoRA adapter
    pictures: "PromptPictures | None" = None  # pictures in the prompt: their vectors replace token embeddings
    prediction: "Prediction | None" = None  # a text that the client expects as the output
    host: "HostWork | None" = None  # how long the host takes for its rows; None: hardly any time

    def __post_init__(self) -> None:
        self.adjustment = adjustment(self.sampling, self.prompt_len)

    @property
    def list_ids(self) -> int:
        """The number of token ids in the request's lists, which are kept as long as the sequence lives."""
        biased = 0 if self.adjustment is None else len(self.adjustment.biased)
        return biased + len(self.sampling.allowed_token_ids) + sum(map(len, self.sampling.bad_words))

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def uncomputed_tokens(self) -> int:
        """The number of tokens without K/V. The step that brings it to zero samples the next token."""
        return len(self.tokens) - self.computed_tokens

    @property
    def next_output(self) -> int:
        """The index, counted from 0, of the output token that the next step samples."""
        return len(self.tokens) - self.prompt_len + self.pending_outputs

    @property
    def known_len(self) -> int:
        """The number of tokens that can be computed without sampling: the sequence's own, and those of an answer."""
        ahead = 0 if self.check is None else self.check.ahead(self.output_len)
        return len(self.tokens) + ahead

    @property
    def cacheable_tokens(self) -> int:
        """How many of the first tokens may come from the prefix cache. The result needs the other tokens' rows."""
        if self.pooling is not None and self.pooling.needs_first_rows:
            return 0
        if self.scores is not None and not self.output_len:
            return self.scores.cacheable_tokens
        return len(self.tokens)


class Chunk(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A part of a planned step: computes tokens[start : start + length] of a sequence.

    A decode is a chunk of one token and its drafts. To check an answer, its ids are drafts after the prompt's last
    token. The class is a Struct, not a dataclass, because each step makes hundreds of chunks, and a Struct costs a
    tenth as much and needs no garbage collection.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool  # whether the next token is sampled, because the chunk reaches the end of the tokens
    drafts: tuple[int, ...] = ()  # proposed next tokens: computed in this step, and their rows are sampled too

    @property
    def first_scored(self) -> int:
        """The index of the first prompt token that this chunk may score. The row of a token scores the next token."""
        scores = self.sequence.scores
        return self.start + 1 if scores is None else max(self.start + 1, scores.start)

    @property
    def rows(self) -> int:
        """How many ids are sampled: one, and one after each draft, as if all drafts up to this one were right."""
        return self.samples + len(self.drafts)


# A row of logits that an id is sampled from: its sequence, and the index of the output token, counted from 0.
Row = tuple[Sequence, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned step, computed in one forward: decodes first, then prompt chunks."""

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
        """The rows that are sampled from, in the order of the ids that Scheduler.update() expects."""
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
        return sum([len(chunk.drafts) for chunk in self.chunks])

    def __bool__(self) -> bool:
        return bool(self.chunks)


class SequenceUpdate(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The result of a step for one sequence. A prompt that is not complete yet has no update."""

    sequence: Sequence
    tokens: list[int]  # new tokens; empty if the sequence ends without one, as with max_tokens 0
    outcome: Outcome | None  # None if the sequence continues
