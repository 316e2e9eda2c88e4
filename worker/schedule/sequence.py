"""A request inside the worker as a few counts; the step that is planned for it, and what that step did to it.

Plain data: knows no policy, no queue, no tensors and no clock.
"""

import sys
from array import array
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from shared.messages import Outcome, Sampling

TILE = 16  # rows that a matrix multiplication computes at once

Key = tuple[bytes, int]  # (frontend id, request id)


class Constraint(Protocol):
    """The state of a sequence's output in its grammar; `worker/grammar` implements it."""

    def accept(self, token: int) -> bool:
        """Called once for each sampled token that is kept; False: the token does not fit, and `error` says why."""

    @property
    def ended(self) -> bool:
        """Nothing more may follow."""

    @property
    def error(self) -> str: ...


class Drafter(Protocol):
    """Proposes draft tokens for one sequence; see speculation.py."""

    def propose(self, tokens: list[int], limit: int, cost: float) -> tuple[int, ...]:
        """At most `limit` tokens that may follow `tokens`, which only ever grow between calls.

        cost: the cost of one draft, as a share of what an accepted one saves.
        """

    def record(self, drafted: int, accepted: int) -> None:
        """The first `accepted` of the last proposal's `drafted` tokens were right."""

    def stop(self) -> None:
        """Proposes nothing any more."""


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is prompt + output; `computed_tokens` of them have K/V in `pages`; the rest is still to be computed.

    There is no state field. Waiting: no pages, not running. Prefill: more than one token is uncomputed. Decode:
    exactly one is.
    """

    # the request
    key: Key
    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    seed: int
    arrival: float  # seconds, the loop's clock
    cache_salt: str = ""  # only sequences with the same salt share cached prefixes
    group: int = 0  # the same for all sequences of one prompt, see queue.py; 0: no group
    priority: int = 0  # lower goes first
    deadline: float = float("inf")  # seconds, the loop's clock
    tenant: str = ""  # the name of its API key, see fair_queue.py

    # progress
    computed_tokens: int = 0  # tokens with K/V, without those of steps in flight
    in_flight_tokens: int = 0  # tokens after those, which steps in flight compute
    pending_outputs: int = 0  # ids, at least, that these steps sample and that the scheduler does not know yet
    constraint: Constraint | None = None
    drafter: Drafter | None = None  # set when it may have drafts for the first time, see speculation.py
    plain_from: int = field(init=False)  # with so many tokens or more, only a grammar can adjust its logits

    # memory
    pages: "array[int]" = field(default_factory=lambda: array("i"))  # C ints, which worker/run/inputs.py copies whole
    digests: list[bytes] = field(default_factory=list)  # of its full pages, see worker/kv_cache/prefix_cache.py
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at its first admission
    charged_tokens: int = 0  # tokens already counted in its tenant's account, see fair_queue.py

    # history
    admitted: float = 0.0  # when it first got pages
    first_token: float = 0.0  # when its first token was applied
    last_token: float = 0.0  # when its latest token was
    preemptions: int = 0
    preempted_for: bool = False  # running sequences were already preempted to admit it
    crashes: int = 0  # of workers, which it is suspected of having caused
    resumed: bool = False  # it was admitted by a worker that is gone
    original_id: int = 0  # its request id at its first worker; 0: this is its first

    def __post_init__(self) -> None:
        sampling = self.sampling
        adjusted = sampling.penalized or bool(sampling.logit_bias)  # at every token; min_tokens only at the first
        self.plain_from = sys.maxsize if adjusted else self.prompt_len + sampling.min_tokens

    @property
    def original_key(self) -> Key:
        """The key that it had at its first worker."""
        return self.key[0], self.original_id or self.key[1]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def next_output(self) -> int:
        """The index, counted from 0, of the output token that the next step samples."""
        return len(self.tokens) - self.prompt_len + self.pending_outputs

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens without K/V; the step that brings this to zero samples the next token."""
        return len(self.tokens) - self.computed_tokens


class Chunk(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Compute tokens[start : start + length] of a sequence; a decode is a chunk of one token and its drafts.

    A Struct, not a dataclass: hundreds are made each step, and these cost a tenth and no garbage collection.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool  # it reaches the end of the tokens, so the next one is sampled from its last row
    drafts: tuple[int, ...] = ()  # proposed next tokens: computed in this step, and sampled from as well

    @property
    def rows(self) -> int:
        """How many ids are sampled: one, and one after each draft as if all drafts before it were right."""
        return self.samples + len(self.drafts)


# A row of logits that an id is sampled from: its sequence, and the index of the output token, counted from 0.
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
    """What a step did to one sequence. A prompt that is not complete yet gets none."""

    sequence: Sequence
    tokens: list[int]  # new ones; empty when the sequence ends without one, as with max_tokens 0
    outcome: Outcome | None  # None: it goes on
