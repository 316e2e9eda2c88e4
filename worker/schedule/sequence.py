"""The data of the scheduler: a sequence (a request inside the worker), a planned step, and the results of a step.

This is plain data, without policies, queues, tensors or clocks.
"""

import sys
from array import array
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from shared.messages import Outcome, Pooling, PoolingKind, Sampling
from worker.schedule.token_counts import TokenCounts

TILE = 16  # a matrix multiplication computes this many rows at once
MOST_ANSWER_DRAFTS = 255  # each has a row of logits, which is as long as the vocabulary

Key = tuple[bytes, int]  # (frontend id, request id)


class Constraint(Protocol):
    """What the output of a sequence must keep to, and its state in that; `worker/grammar` implements it."""

    def accept(self, token: int) -> bool:
        """Adds a sampled token to the output. Called once for each token that is kept.

        Returns False if the token does not fit; `error` then says why.
        """

    @property
    def ended(self) -> bool:
        """Whether the output is complete, so that no token may follow."""

    @property
    def masks(self) -> bool:
        """Whether it forbids any token now."""

    @property
    def idle(self) -> bool:
        """Whether no later token can be forbidden any more."""

    @property
    def error(self) -> str: ...


class Drafter(Protocol):
    """Proposes draft tokens for one sequence; see speculation.py."""

    def propose(self, tokens: list[int], limit: int, cost: float) -> tuple[int, ...]:
        """Returns at most `limit` tokens that may follow `tokens`. Between calls, `tokens` may only grow.

        cost: the cost of one draft token, as a share of what an accepted one saves.
        """

    def record(self, drafted: int, accepted: int) -> None:
        """Notes that of the `drafted` tokens of the last proposal, the first `accepted` were accepted."""

    def stop(self) -> None:
        """Makes propose() return no tokens from now on."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the scheduler.

    `tokens` is prompt + output. The first `computed_tokens` of them have K/V in `pages`; the others have none yet.
    Each group of layers (worker/kv_cache/groups.py) has pages of its own. The pages behind the group's window have been
    returned, and their entries are the scratch page. Layers with a recurrent state have slots (states.py): a step from
    position `start` on reads `states[start]`, and writes the last of `free_slots`.

    There is no state field. A waiting sequence has no pages. A running sequence with more than one uncomputed token is
    in prefill, and with exactly one in decode.
    """

    # the request
    key: Key
    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    seed: int
    arrival: float  # seconds of the loop's clock
    cache_salt: str = ""  # only sequences with the same salt share cached prefixes
    group: int = 0  # the same for all sequences of one prompt, see queue.py; 0 if there is no group
    priority: int = 0  # lower goes first
    deadline: float = float("inf")  # seconds of the loop's clock
    tenant: str = ""  # the name of its API key, see fair_queue.py
    pooling: Pooling | None = None  # it samples nothing, and its result is a vector (worker/run/pooling.py)
    answer: list[int] | None = None  # the output is compared with these ids, which are computed as drafts
    scored_from: int = 0  # with `prompt_logprobs`: only of the prompt's tokens from this index on

    # progress
    computed_tokens: int = 0  # tokens with K/V, not counting steps in flight
    in_flight_tokens: int = 0  # the following tokens, which steps in flight compute
    pending_outputs: int = 0  # new ids that steps in flight will give it, not counting accepted drafts
    constraint: Constraint | None = None
    drafter: Drafter | None = None  # set before its first draft, see speculation.py
    most_drafts: int = MOST_ANSWER_DRAFTS  # ids of `answer` in one step; halved when a step has failed
    _counts: TokenCounts | None = field(default=None, init=False)  # see counts_before()
    plain_from: int = field(init=False)  # from this many tokens on, only its constraint can adjust its logits

    # memory
    pages: "list[array[int]]" = field(default_factory=list)  # for each group, C ints: worker/run/inputs.py copies them
    room: int = 0  # how many tokens the pages of all groups have slots for
    states: dict[int, int] = field(default_factory=dict)  # number of tokens → slot of the recurrent state after them
    free_slots: list[int] = field(default_factory=list)  # its other slots
    digests: list[bytes] = field(default_factory=list)  # digests of its full pages, see worker/kv_cache/prefix_cache.py
    cached_tokens: int = 0  # tokens found in the prefix cache at its first admission, those of earlier output, too
    charged_tokens: int = 0  # tokens already counted in its tenant's account, see fair_queue.py

    # history
    admitted: float = 0.0  # when it first got pages
    first_token: float = 0.0  # when its first token was applied
    last_token: float = 0.0  # when its latest token was applied
    preemptions: int = 0
    preempted_for: bool = False  # whether running sequences were already preempted to admit it
    crashes: int = 0  # number of worker crashes that it is suspected of having caused
    resumed: bool = False  # whether a worker that is gone admitted it before
    original_id: int = 0  # its request id at its first worker; 0 if this is its first worker

    def __post_init__(self) -> None:
        sampling = self.sampling
        adjusted = sampling.penalized or bool(sampling.logit_bias)  # for all tokens; min_tokens: the first ones
        self.plain_from = sys.maxsize if adjusted else self.prompt_len + sampling.min_tokens

    @property
    def original_key(self) -> Key:
        """The key that the sequence had at its first worker."""
        return self.key[0], self.original_id or self.key[1]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def cacheable_tokens(self) -> int:
        """How many of its first tokens may come from the prefix cache: its result needs the rows of the others."""
        if self.pooling is not None:
            return 0 if self.pooling.kind in (PoolingKind.MEAN, PoolingKind.FIRST) else len(self.tokens)
        if self.sampling.prompt_logprobs and not self.output_len:
            return max(0, self.scored_from - 1)
        return len(self.tokens)

    @property
    def next_output(self) -> int:
        """The index, counted from 0, of the output token that the next step samples."""
        return len(self.tokens) - self.prompt_len + self.pending_outputs

    @property
    def answer_ahead(self) -> int:
        """How many ids of `answer` can be drafts of the next step. The last id is only compared, never computed."""
        return 0 if self.answer is None else max(0, len(self.answer) - self.output_len - 1)

    @property
    def known_len(self) -> int:
        """The number of tokens that can be computed without sampling: its tokens, and the answer that it checks."""
        return len(self.tokens) + self.answer_ahead

    @property
    def checked(self) -> bool:
        """Whether the output has come to the end of `answer`, or differs from it in its last token."""
        if self.answer is None:
            return False
        output = self.output_len
        return output >= len(self.answer) or (output > 0 and self.tokens[-1] != self.answer[output - 1])

    def counts_before(self, output: int) -> TokenCounts:
        """Counts the tokens that precede output token `output` if all drafts before it are right.

        The result is kept and changes with the next call, which only adds the tokens that are new. If a call asks for
        fewer tokens than the last one, as after a failed step, everything is counted again.
        """
        text, begin = (self.tokens, self.prompt_len) if self.answer is None else (self.answer, 0)
        end = len(text) - begin if self.answer is None else min(output, len(text))
        if self._counts is None or self._counts.outputs > end:
            self._counts = TokenCounts(self.tokens[: self.prompt_len])
        self._counts.add(text[begin + self._counts.outputs : begin + end])
        return self._counts

    @property
    def uncomputed_tokens(self) -> int:
        """The number of tokens without K/V. The step that brings it to zero samples the next token."""
        return len(self.tokens) - self.computed_tokens


class Chunk(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A part of a planned step: computes tokens[start : start + length] of a sequence.

    A decode is a chunk of one token and its drafts. The drafts of an answer that is checked are its ids, and follow the
    last token of the prompt. The class is a Struct, not a dataclass: each step makes hundreds of chunks, and Structs
    cost a tenth and no garbage collection.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool  # whether the next token is sampled from its last row, which is the end of the tokens
    drafts: tuple[int, ...] = ()  # proposed next tokens: computed in this step, and their rows are sampled too

    @property
    def first_scored(self) -> int:
        """The index of the first token of the prompt that this chunk's rows may score: its first row's is the next."""
        return max(self.start + 1, self.sequence.scored_from)

    @property
    def rows(self) -> int:
        """How many ids are sampled: one, and one more after each draft, as if all drafts up to it were right."""
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
    """The result of a step for one sequence. There is none for a prompt that is not complete yet."""

    sequence: Sequence
    tokens: list[int]  # new tokens; empty if the sequence ends without one, as with max_tokens 0
    outcome: Outcome | None  # None if the sequence continues
