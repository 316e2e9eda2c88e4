"""The data of the scheduler: a sequence (a request inside the worker), a planned step, and the results of a step.

This is plain data, without policies, queues, tensors or clocks.
"""

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from shared.messages import Adapter, Outcome, Pooling, Prefill, Sampling
from worker.kv_cache.prefix_cache import Mark

if TYPE_CHECKING:
    from worker.kv_cache.store import Fetch
    from worker.scheduler.drafts import Speculation
    from worker.scheduler.fetching import StoredPrefix
    from worker.scheduler.host_budget import HostWork
    from worker.scheduler.prompt_images import PromptImages


Key = tuple[bytes, int]  # (frontend id, request id)
Ids = tuple[int, ...]  # token ids


# The history of a sequence: its times, its preemptions and drafts, and what happened to it at earlier workers.


@dataclass(slots=True)
class RequestStats:
    """The history of a sequence. Times are seconds of the loop's clock; 0: the event has not happened yet."""

    arrival: float = 0.0
    admitted: float = 0.0  # when the sequence first got pages
    first_token: float = 0.0  # when its first output token was applied
    last_token: float = 0.0  # when its latest output token was applied
    preemptions: int = 0
    drafted: int = 0  # draft tokens that were computed
    accepted: int = 0  # draft tokens that were accepted
    crashes: int = 0  # number of worker crashes that the sequence is suspected of having caused
    resumed: bool = False  # whether a worker that is gone had admitted the sequence before
    original_id: int = 0  # the request id at the sequence's first worker; 0 if this is its first worker
    prefill: Prefill = Prefill.HERE  # whether this worker only computes the prompt, or another worker has done so


# The data with which a sequence finds and shares pages in the prefix cache (worker/kv_cache/prefix_cache.py).


@dataclass(slots=True)
class PrefixState:
    """A sequence's data for the prefix cache."""

    salt: str = ""  # only sequences with the same salt share cached prefixes
    digests: list[bytes] = field(default_factory=list)  # the digests of its first full pages
    mark: Mark | None = None  # returns the bytes that stand for images in a page's digest; None: no images
    claimed_tokens: int = 0  # tokens found in the cache when the sequence got its pages; the others must be computed
    cached_tokens: int = 0  # prompt and earlier output tokens found in the cache, or the K/V store, at first admission
    stored: "StoredPrefix | None" = None  # what the K/V store knows of it; None without a store, or before admission
    keep_s: int = 0  # see Submit


# The data that decides when a waiting sequence may run: its tenant, priority, group and deadline.


@dataclass(slots=True)
class SchedulingParams:
    """The place of a sequence in the queue. queue.py reads it, and updates the charge."""

    group: int = 0  # group id, equal for all sequences of one prompt, see queue.py; 0: no group
    priority: int = 0  # lower goes first
    deadline: float = float("inf")  # seconds of the loop's clock
    tenant: str = ""  # the name of the API key that the request came with, see queue.py
    charged_tokens: int = 0  # tokens already counted in its tenant's account
    preempted_for: bool = False  # whether running sequences were already preempted to admit it


# Counts the tokens of a sequence for penalties. New tokens are added to the counts, so none is counted twice.


class TokenCounts:
    """The distinct tokens of a prompt and of the first `outputs` tokens of its output.

    ids: the distinct token ids, in the order of their first occurrence, as C int64.
    counts: for each of `ids`, how often it occurs in the output (0: only in the prompt), as C int64.
    """

    def __init__(self, prompt: list[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self.ids = array("q", self._places)
        self.counts = array("q", bytes(self.ids.itemsize * len(self.ids)))
        self._prompt_ids = len(self.ids)
        self.outputs = 0

    def add(self, output: Seq[int]) -> None:
        """Adds the next tokens of the output."""
        self.outputs += len(output)
        for token in output:
            place = self._places.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.counts.append(0)
            self.counts[place] += 1

    def remove(self, output: Seq[int]) -> None:
        """Takes back the tokens that were added last. output: these tokens, in the order in which they were added"""
        self.outputs -= len(output)
        for token in reversed(output):
            place = self._places[token]
            self.counts[place] -= 1
            if not self.counts[place] and place >= self._prompt_ids:  # no earlier token of the output added its entry
                del self._places[token], self.ids[place], self.counts[place]


# Adjustments of a sequence's logits other than grammars: penalties, biases, min_tokens, or a chain of samplers.


class LogitsProcessing:
    """How long the logits of a sequence are adjusted, its biases, and the counts of its tokens for penalties.

    until: the length of the sequence, in tokens, from which on its logits are no longer adjusted
    biased, biases: the token ids with a bias, [B] as C int64, each once, and what is added to their logits, [B] as C
        float32
    """

    __slots__ = ("_ahead", "_counts", "biased", "biases", "until")

    def __init__(self, until: int, logit_bias: tuple[tuple[int, float], ...] = ()) -> None:
        """logit_bias: (id, bias); of equal ids, the last one counts"""
        last = dict(logit_bias)
        self.until = until
        self.biased, self.biases = array("q", last), array("f", last.values())
        self._counts: TokenCounts | None = None
        self._ahead: Ids = ()  # the drafts that are counted now, after the tokens of the sequence

    def counts_before(self, tokens: list[int], prompt_len: int, ahead: Ids = ()) -> TokenCounts:
        """Counts the tokens that precede a row: those of the sequence, then the drafts before the row.

        tokens: prompt and output, which may only grow between calls. ahead: the drafts

        The result is the same object at each call: a call only adds the new tokens to it, and takes back the drafts of
        an earlier row unless this row follows them.
        """
        kept = len(self._ahead)
        counted = 0 if self._counts is None else self._counts.outputs - kept
        if self._counts is None or counted > len(tokens) - prompt_len:
            self._counts, counted, kept = TokenCounts(tokens[:prompt_len]), 0, 0
        elif counted < len(tokens) - prompt_len or self._ahead != ahead[:kept]:
            self._counts.remove(self._ahead)
            kept = 0
        self._counts.add(tokens[prompt_len + counted :])
        self._counts.add(ahead[kept:])
        self._ahead = ahead
        return self._counts


def logits_processing(sampling: Sampling, prompt_len: int) -> LogitsProcessing | None:
    """Returns how a request changes its logits; None if nothing does."""
    if sampling.penalized or sampling.logit_bias or sampling.chain is not None:
        return LogitsProcessing(sys.maxsize, sampling.logit_bias)
    return LogitsProcessing(prompt_len + sampling.min_tokens) if sampling.min_tokens else None


def with_biases_of(target: LogitsProcessing | None, own: LogitsProcessing | None) -> LogitsProcessing | None:
    """Returns the processing of a drafter's copy of a sequence, with the biases of the target."""
    if target is None or not len(target.biased):
        return own
    adjusted = own or LogitsProcessing(sys.maxsize)
    adjusted.until, adjusted.biased, adjusted.biases = sys.maxsize, target.biased, target.biases
    return adjusted


TILE = 16  # a matrix multiplication computes this many rows at once
NO_ID = -1  # stands for the id of a row that cannot be sampled yet, see accepted_ids


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the scheduler.

    `tokens` is prompt + output. The first `computed_tokens` of them have K/V in `pages`; the others have none yet.
    Each group of layers (worker/kv_cache/tensors.py) has pages of its own. The pages behind the group's window have
    been returned, and their entries are the scratch page.

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
    capacity: int = 0  # how many tokens the pages of all groups have slots for

    fetch: "Fetch | None" = None  # the sequence waits for pages from the K/V store, and is in no plan

    # the sequence's place in the queue, its history, and the prefix that it shares with other sequences
    turn: SchedulingParams = field(default_factory=SchedulingParams)
    history: RequestStats = field(default_factory=RequestStats)
    prefix: PrefixState = field(default_factory=PrefixState)

    # features
    constraint: "Constraint | None" = None  # a grammar, or rules about tokens
    logits_processing: LogitsProcessing | None = field(init=False)  # penalties, biases and min_tokens
    check: "AnswerCheck | None" = None  # an answer that the output is compared with
    scores: "PromptScores | None" = None  # which prompt tokens get log-probabilities (`prompt_logprobs`)
    pooling: Pooling | None = None  # the result is a vector and nothing is sampled (worker/model_runner/logprobs.py)
    second_from: int = 0  # where the second text of a pair begins; 0: there is only one text
    states: "SequenceStates | None" = None  # slots of recurrent states, if layers have any
    mirostat: "MirostatRecord | None" = None  # the state of the Mirostat sampler
    adapter: "AdapterUse | None" = None  # a LoRA adapter
    images: "PromptImages | None" = None  # images in the prompt: their vectors replace token embeddings
    prediction: "Prediction | None" = None  # a text that the client expects as the output
    host: "HostWork | None" = None  # how long the host takes for its rows; None: hardly any time

    def __post_init__(self) -> None:
        self.logits_processing = logits_processing(self.sampling, self.prompt_len)

    @property
    def list_ids(self) -> int:
        """The number of token ids in the request's lists, which are kept as long as the sequence lives."""
        biased = 0 if self.logits_processing is None else len(self.logits_processing.biased)
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
    drafts: Ids = ()  # proposed next tokens: computed in this step, and their rows are sampled too
    forced: tuple[int, int] = (0, 0)  # how many of the first and of the last drafts are forced by the constraint

    @property
    def first_scored(self) -> int:
        """The index of the first prompt token that this chunk may score. The row of a token scores the next token."""
        scores = self.sequence.scores
        return self.start + 1 if scores is None else max(self.start + 1, scores.start)

    @property
    def rows(self) -> int:
        """How many ids are sampled: one, and one after each draft, as if all drafts up to this one were right."""
        return self.samples + len(self.drafts)


# A row of logits that an id is sampled from: its sequence, the index of the output token, counted from 0, and the
# drafts before the row. The id is sampled as if these drafts followed the tokens of the sequence.
Row = tuple[Sequence, int, Ids]


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
                rows.append((sequence, output, ()))
                if chunk.drafts:
                    rows += [(sequence, output + at, chunk.drafts[:at]) for at in range(1, chunk.rows)]
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


# The slots for recurrent states that one sequence has. recurrent_slots.py gives and takes back slots.


@dataclass(slots=True, eq=False)
class SequenceStates:
    """The slots of a sequence. A step from position `start` on reads slot `at[start]`, and writes slot `free[-1]`."""

    at: dict[int, int] = field(default_factory=dict)  # number of tokens → slot of the recurrent state after them
    free: list[int] = field(default_factory=list)  # slots of the sequence that hold no state now


def slots_of(sequence: "Sequence") -> SequenceStates:
    """Returns the slots of a running sequence of a model with recurrent layers."""
    assert sequence.states is not None, "a waiting sequence has no slots"
    return sequence.states


# The interface of constraints on the output of a sequence: grammars and rules about tokens.


class Constraint(Protocol):
    """A rule for the output of a sequence, and the position of the output in it. worker/structured_output has them."""

    def accept(self, token: int) -> bool:
        """Adds a sampled token to the output. Called once for each token that is kept.

        Returns False if the rule does not allow the token; `error` then says why.
        """

    @property
    def ended(self) -> bool:
        """Whether the output is complete, so that no token may follow."""

    @property
    def masks(self) -> bool:
        """Whether the rule forbids any token at the present position."""

    @property
    def idle(self) -> bool:
        """Whether the rule will not forbid any token from now on."""

    @property
    def error(self) -> str: ...

    def forced(self, limit: int) -> Ids:
        """Returns at most `limit` ids that the output must continue with, as far as that is known."""

    def prepare(self, tenant: str) -> bool:
        """Begins to compute the mask of the present position outside of the steps. Returns whether it is there."""

    @property
    def is_computed(self) -> bool:
        """Whether that mask is being computed now, so that a step with this row would stand still until it is there."""

    def after(self, ids: Ids) -> "tuple[Constraint, int]":
        """Returns a copy of the constraint after the longest allowed prefix of `ids`, and the length of this prefix."""


def accept(sequence: Sequence, constraint: Constraint, id: int) -> bool:
    """Passes a sampled id to the constraint of a sequence. Returns False if the constraint does not allow the id."""
    fits = constraint.accept(id)
    if fits and constraint.idle:
        sequence.constraint = None
    return fits


# Draft tokens of a chunk: guessed next tokens, computed in the same step and accepted if the same ids are sampled.
#
# drafts.py guesses drafts; AnswerCheck takes them from an answer.


def accepted_ids(ids: list[int], drafts: Ids) -> list[int]:
    """Returns the valid sampled ids: all up to and including the first id that differs from its draft.

    If this first id is NO_ID, it is left out. Its row is computed again in a step without drafts before it: only then
    may an empty mask end the sequence, because only then the constraint itself is in this state, and not a copy.
    """
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, drafts, strict=False)))
    return ids[:right] if ids[right] == NO_ID else ids[: right + 1]


def without_drafts(chunk: Chunk, speculation: "Speculation | None") -> Chunk:
    """Returns the chunk without drafts, for a retry. Later steps have no drafts, or fewer if an answer is checked."""
    if chunk.sequence.check is not None:
        chunk.sequence.check.failed(len(chunk.drafts))
    elif speculation is not None:
        speculation.failed(chunk.sequence)
    return Chunk(chunk.sequence, chunk.start, chunk.length - len(chunk.drafts), chunk.samples)


# The LoRA adapter of a sequence, and whether it may run together with the adapters of other sequences.


@dataclass(slots=True)
class AdapterUse:
    """The adapter that a request names. loaded: its weights (worker/lora/loaded.py); None before they are read."""

    adapter: Adapter
    loaded: Any = None

    def has_place(self, running: "Iterable[Sequence]", most: int) -> bool:
        """Returns whether the running sequences and this one together use at most `most` different adapters."""
        return len(used_by(running) | {self.adapter.unscaled}) <= most


def has_adapters(plan: "Plan") -> bool:
    return any([chunk.sequence.adapter is not None for chunk in plan.chunks])


def used_by(sequences: "Iterable[Sequence]") -> set[Adapter]:
    """Returns the adapters that the sequences use. Adapters that differ only in their scale count as one."""
    return {one.adapter.adapter.unscaled for one in sequences if one.adapter is not None}


# Checks an answer: its ids are computed as drafts after the last known token, and compared with the sampled ids.

MOST_DRAFTS = 255  # drafts in one step: each needs a row of logits, which is as long as the vocabulary


@dataclass(slots=True, eq=False)
class AnswerCheck:
    """The answer that a sequence checks, and how many of its ids a step may compute."""

    answer: list[int]
    most_drafts: int = MOST_DRAFTS  # drafts in one step; halved when a step has failed

    def ahead(self, output_len: int) -> int:
        """Returns how many ids can be drafts after `output_len` output tokens. The last id is never a draft."""
        return max(0, len(self.answer) - output_len - 1)

    def drafts(self, output_len: int) -> Ids:
        """Returns the ids that can be drafts of the next step."""
        return tuple(self.answer[output_len : output_len + min(self.ahead(output_len), self.most_drafts)])

    def finished(self, output_len: int, last: int) -> bool:
        """Whether the check is over: the output is as long as the answer, or its `last` token is not the answer's."""
        return output_len >= len(self.answer) or (output_len > 0 and last != self.answer[output_len - 1])

    def failed(self, drafts: int) -> None:
        """Notes that a step with `drafts` drafts has failed. The next steps have half as many."""
        self.most_drafts = drafts // 2


# A text that the client expects as the output. Its ids become drafts (drafts.py).


@dataclass(slots=True, eq=False)
class Prediction:
    """The predicted text. accepted, rejected: how many of its tokens were accepted, and rejected, as drafts."""

    ids: list[int]
    accepted: int = 0
    rejected: int = 0


# Scores of a prompt: the log-probabilities of the prompt's tokens (worker/model_runner/logprobs.py).


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Which prompt tokens of a sequence are scored. The logits of a token's row score the next token."""

    start: int = 0  # the index of the first token that is scored

    @property
    def cacheable_tokens(self) -> int:
        """How many tokens may come from the prefix cache, because their rows score no token."""
        return max(0, self.start - 1)


# Computes existing output again, because the next tokens depend on more than the ids (see
# worker/model_runner/sampler_chain.py).

MOST_REPLAYED = 31  # most tokens to replay in one step; each needs a row of logits, copied to the host


@dataclass(slots=True, eq=False)
class Replay(AnswerCheck):
    """Existing output, computed again as drafts. After it, the sequence continues as if it had no check."""

    sequence: Sequence | None = None

    def finished(self, output_len: int, last: int) -> bool:
        """Returns False. At the end of the replayed output, it also removes this check from the sequence."""
        if output_len >= len(self.answer) and self.sequence is not None:
            self.sequence.check = None
            self.sequence = None
        return False


def replay(sequence: Sequence, output: list[int]) -> None:
    """Makes a sequence compute its output again."""
    sequence.check = Replay(output, MOST_REPLAYED, sequence)


# The state of the Mirostat sampler for a sequence (worker/model_runner/sampler_chain.py computes it).
#
# The next token depends on how surprising each earlier output token was. A resumed stream, or an answer that is
# continued, therefore computes its output again from the first token on, with the ids that are known.


@dataclass(slots=True, eq=False)
class MirostatRecord:
    """The state of Mirostat.

    forced: the known ids of the beginning of the output, which replace those that are drawn.
    bounds: mu for each output token, in bits.
    ids, shares: the tokens that the latest token was drawn from, [N] as C uint32 in ascending order, and their
        probabilities, [N] as C float64. A dict of them would take ten times as much memory: 18 MiB of 152,000 tokens.
    """

    forced: list[int]
    bounds: list[float]
    ids: "array[int]" = field(default_factory=lambda: array("I"))
    shares: "array[float]" = field(default_factory=lambda: array("d"))

    def share(self, id: int) -> float | None:
        """Returns the probability with which a token was drawn; None if it was not among the candidates."""
        at = bisect_left(self.ids, id)
        return self.shares[at] if at < len(self.ids) and self.ids[at] == id else None


def begin(sequence: Sequence) -> None:
    """Gives a new sequence its record. If the sequence comes with output, this output will be computed again."""
    chain = sequence.sampling.chain
    assert chain is not None
    forced = sequence.tokens[sequence.prompt_len :]
    sequence.mirostat = MirostatRecord(forced, [2 * chain.mirostat_tau])
    del sequence.tokens[sequence.prompt_len :]
    if forced and sequence.check is None:
        replay(sequence, forced)
