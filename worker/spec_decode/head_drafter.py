"""Proposes drafts with a draft head: a layer that reads hidden states of the served model.

The row of the second-last token gives the first draft. Each further draft comes from the row of the draft before it.
That row reads the head's own output instead of a hidden state of the served model. A draft is sampled like the token
itself, with the same parameters, seed and position, so it is often right. Nothing here changes an answer.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from worker.checkpoint.stored_weight import Layout, Shape
from worker.kv_cache.pages import PagePool
from worker.kv_cache.tensors import KVCache
from worker.model_runner.hidden_states import CONTEXT, CapturedStates, HiddenStates, ReadStep, read_step
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder
from worker.models.forward_inputs import Forward, ForwardInputs, Model
from worker.operations import Operations
from worker.ops import native as c_library
from worker.ops.linear.packed import PackedLinear, pack_stacked
from worker.ops.quantized_weight import INT4, QuantizedWeight
from worker.scheduler.sequence import Chunk, Plan, Sequence
from worker.spec import ModelSpec
from worker.spec_decode.model_drafter import (
    CATCH_UP,
    PAGE_SIZE,
    Device,
    DraftRunner,
    NeuralDrafter,
    grow,
    page_count,
    sampling_of_drafts,
)

# The data of a draft head for each sequence: hidden states that it has not read yet, and K/V pages of its own layer.
#
# The head computes a row for each token: the row reads the token's hidden state and the id of the next token. The
# rows of a sequence have no gaps, but may begin after its first token, for example at the end of a cached prefix. The
# head counts rows from 0, because rotary embeddings depend only on distances. After a gap, the head starts again with
# no rows. Then fewer of its drafts are accepted, but no answer changes.


@dataclass(slots=True, eq=False)
class HeadSequence:
    """The head's data for a sequence of the served model, the target.

    `own.tokens` are the tokens of the target after its first row, followed by drafts. The K/V of the first
    `own.computed_tokens` rows was computed from hidden states of the target.
    """

    target: Sequence
    own: Sequence
    first: int = 0  # the position in the target of row 0
    unread: list[Tensor] = field(default_factory=list)  # hidden states [N, H] of the rows that are not computed yet
    unread_rows: int = 0
    last: Tensor | None = None  # the hidden state [1, H] of the last computed row
    known: int = 0  # how many of own.tokens are not drafts

    @classmethod
    def of(cls, target: Sequence, first: int) -> "HeadSequence":
        own = Sequence(target.key, [], 0, sampling_of_drafts(target.sampling), target.seed, pages=[array("i")])
        own.logits_processing = target.logits_processing  # it depends on own.next_output, which is that of the target
        return cls(target, own, first)

    @property
    def end(self) -> int:
        """The position in the target after its last known hidden state."""
        return self.first + self.own.computed_tokens + self.unread_rows

    def read(self, start: int, hidden: Tensor) -> None:
        """Adds the hidden states of the tokens from position `start` on. Forgets hidden states of wrong drafts."""
        self._cut(len(self.target.tokens) - 1)
        if not self.first <= start <= self.end:
            self._begin_at(start, [])
        new = hidden[self.end - start :]
        if len(new):
            self.unread.append(new)
            self.unread_rows += len(new)
        if self.unread_rows > 2 * CONTEXT:  # no drafts were wanted for a long time: keep only the last states
            self._begin_at(self.end - CONTEXT, [torch.cat(self.unread)[-CONTEXT:].clone()])

    def follow(self) -> bool:
        """Takes over the tokens of the target. Returns whether the row of the first draft can be computed."""
        target, own = self.target.tokens, self.own
        self._cut(len(target) - 1)
        if self.end < len(target) - 1 or self.end == self.first:
            return False
        del own.tokens[self.known :]
        own.tokens.extend(target[self.first + 1 + self.known :])
        self.known = len(own.tokens)
        own.prompt_len = self.known - self.target.next_output  # so that drafts are sampled like the tokens themselves
        if self.last is not None and not self.unread:  # the last row is computed again for its output
            own.computed_tokens -= 1
            self.unread, self.unread_rows = [self.last], 1
        return True

    def take(self, count: int) -> Tensor:
        """Returns the next `count` unread hidden states [N, H], and counts their rows as computed."""
        rows = torch.cat(self.unread) if len(self.unread) > 1 else self.unread[0]
        self.unread = [rows[count:]] if count < len(rows) else []
        self.unread_rows = len(rows) - count
        self.last = rows[count - 1 : count]
        self.own.computed_tokens += count
        return rows[:count]

    def _cut(self, end: int) -> None:
        """Forgets the unread hidden states of the target's tokens from position `end` on."""
        while self.unread and (extra := self.end - end) > 0:
            rows = self.unread.pop()
            kept = rows[: max(0, len(rows) - extra)]
            self.unread_rows += len(kept) - len(rows)
            if len(kept):
                self.unread.append(kept)

    def _begin_at(self, first: int, unread: list[Tensor]) -> None:
        self.first, self.unread, self.unread_rows = first, unread, sum(map(len, unread))
        self.last, self.known, self.own.computed_tokens = None, 0, 0
        self.own.tokens.clear()


class HeadSequences:
    """All sequences of the head, and the pool of their pages. A sequence gets pages only when drafts are wanted."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._held: dict[Sequence, HeadSequence] = {}  # target → the head's data for it

    def __len__(self) -> int:
        return len(self._held)

    def read(self, target: Sequence, start: int, hidden: Tensor) -> None:
        held = self._held.get(target)
        if held is None:
            held = self._held[target] = HeadSequence.of(target, start)
        held.read(start, hidden)

    def of(self, target: Sequence) -> HeadSequence:
        """Returns the head's data for a target. Raises KeyError if read() was never called for it."""
        return self._held[target]

    def get(self, target: Sequence, drafts: int, longest: int) -> HeadSequence | None:
        """Returns the head's data for a target, with pages for its rows and `drafts` drafts.

        Returns None if hidden states are missing, there are more than `longest` rows, or the memory does not suffice.
        """
        held = self._held.get(target)
        if held is None or not held.follow():
            return None
        rows = len(held.own.tokens) + drafts
        return held if rows <= longest and grow(held.own.pages[0], self._pool, rows) else None

    def forget(self, target: Sequence) -> None:
        """Frees the hidden states and pages of a target, if it has any."""
        held = self._held.pop(target, None)
        if held is not None:
            self._pool.release(held.own.pages[0])


class Head(Protocol):
    """The weights and the input of a draft head (mtp.py, eagle.py). H: the hidden size of its layer.

    name: its name in the log. decoder: its layer, with the embedding and the output head that it uses.
    layers: the layers of the served model whose outputs it reads; empty: it reads the output of the last norm.
    normed: whether a draft's row reads the previous row's output after the last norm; else before the last norm.
    target_ids [D]: the served model's id for each of the D tokens of the head; None: both have the same ids.
    """

    @property
    def name(self) -> str: ...
    @property
    def decoder(self) -> Decoder: ...
    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def normed(self) -> bool: ...
    @property
    def target_ids(self) -> Tensor | None: ...
    def with_decoder(self, decoder: Decoder) -> "Head": ...

    def features(self, hidden: Tensor) -> Tensor:
        """Returns the vectors [N, H] that the head reads for N tokens. hidden [N, W]: from the served model."""

    def inputs(self, inputs: ForwardInputs, features: Tensor) -> ForwardInputs:
        """Returns the inputs of the head's layer.

        inputs: the inputs of T rows. A row combines the features of a token with the id of the next token.
        features [T, H]: the vectors that the rows read
        """


class HeadModel:
    """A draft head as the model of a runner (Model in worker/models/forward_inputs.py).

    A row reads features: those in `given` if the host knew its token when the step was launched; else the token is a
    draft, and the features are those that followed from the row which the draft was sampled from.
    given [CATCH_UP, H]: written before a step is launched. following [CATCH_UP, H]: from the rows with logits of the
    last step. Both are at fixed addresses.
    vocab_size: the served model's
    """

    def __init__(self, head: Head, model: Model, vocab_size: int) -> None:
        self.head, self._model, self._vocab_size = head, model, vocab_size
        self.spec, self.operations, self.max_positions = model.spec, model.operations, model.max_positions
        self.layers_started, self.count_replayed = model.layers_started, model.count_replayed
        embed, hidden = head.decoder.weights.embed, model.spec.hidden_size
        self._own = HiddenStates(() if head.normed else (0,), hidden, embed.dtype)
        self.given, self.following = embed.like.new_zeros(2, CATCH_UP, hidden)

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Returns the logits of the served model's tokens, [R, vocab] float32."""
        return self.logits(self.hidden(inputs, cache))

    def hidden(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        features, sources = self.given[: len(inputs.token_ids)], inputs.sources
        if sources is not None:
            features = torch.where((sources < 0)[:, None], features, self.following[sources.clamp(min=0)])
        normed, following = self._own.of_step(self._model, self.head.inputs(inputs, features), cache)
        self.following[: len(following)].copy_(following)
        return normed

    def logits(self, h: Tensor) -> Tensor:
        logits, ids = self._model.logits(h), self.head.target_ids
        if ids is None:
            return logits
        return logits.new_full((len(logits), self._vocab_size), -torch.inf).index_copy_(1, ids, logits)

    def with_operations(self, operations: Operations) -> "HeadModel":
        raise NotImplementedError("a draft head has no adapters")


class HeadDrafter(NeuralDrafter):
    """Runs a draft head. The runner calls it as `hidden_reader`, and Speculation as `proposer`.

    A sequence gets drafts only after the head has read all its hidden states.
    served: the spec of the served model. pool_bytes: the maximum memory for K/V, but always enough for one sequence.
    Sequences for which there is no room get no drafts. ahead, graphs: see DraftRunner. captured_tokens: the most tokens
    of a step of the served model that is replayed as a graph.
    """

    def __init__(
        self, head: Head, served: ModelSpec, pool_bytes: int, *, ahead: bool = False, graphs: bool = False,
        captured_tokens: int = 0,
    ) -> None:  # fmt: skip
        decoder = head.decoder
        spec, embed, self._longest = decoder.spec, decoder.weights.embed, decoder.max_positions
        pages = page_count(spec, embed.dtype, self._longest, pool_bytes, embed.device)
        self._cache = KVCache(spec, [pages], PAGE_SIZE, embed.dtype, embed.device)
        self.head, self.name = head, head.name
        self._model = HeadModel(head, fastest_decoder(decoder, self._cache), served.vocab_size)
        self.steps = DraftRunner(self._model, self._cache, ahead=ahead, graphs=graphs)
        self.sequences = HeadSequences(PagePool(pages, PAGE_SIZE))
        self.hidden_states = HiddenStates(head.layers, served.hidden_size, embed.dtype)
        # In captured steps, the served model's graph ends with the features, so that they need no launch of their own.
        # Elsewhere they are computed only when drafts are wanted.
        self._captured = (
            CapturedStates(self.hidden_states, captured_tokens, embed.device, head.features, spec.hidden_size)
            if captured_tokens
            else None
        )

    def reads(self, inputs: ForwardInputs, plan: Plan) -> ReadStep | None:
        """Returns a step of the served model that stores the hidden states of its sequences."""
        return None if self.failed else read_step(inputs, plan, self.hidden_states, self._read)

    def captured(self, model: Forward, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        assert self._captured is not None
        return self._captured.logits(model, inputs, cache)

    def replayed(self, plan: Plan) -> None:
        if self._captured is not None and not self.failed:
            self._captured.read(plan, self.sequences.read)

    def forget(self, target: Sequence) -> None:
        """Frees the memory of a sequence that has ended."""
        self.sequences.forget(target)

    def _read(self, target: Sequence, start: int, hidden: Tensor) -> None:
        kept = hidden if self._captured is None else self.head.features(hidden)
        self.sequences.read(target, start, kept)

    @torch.inference_mode()
    def _propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        held = [self.sequences.get(target, count, self._longest) for target, count in wanted]
        chunks = self._unread([one for one in held if one is not None])
        ready = {chunk.sequence for chunk in chunks if chunk.samples}
        counts = {
            one: count for one, (_, count) in zip(held, wanted, strict=True) if one is not None and one.own in ready
        }
        by_own = {one.own: one for one in counts}
        going, drafted = [by_own[chunk.sequence] for chunk in chunks if chunk.samples], 0
        while chunks:
            self.steps.launch(chunks)
            drafted += 1
            left = [at for at, one in enumerate(going) if counts[one] > drafted]
            going = [going[at] for at in left]
            chunks = [_next_chunk(one.own) for one in going]
            if chunks and not self.steps.ahead:  # the host knows the drafts, so the rows read `given`
                self._model.given[: len(left)].copy_(self._model.following[left])
        self.steps.read()
        return [() if one is None or one not in counts else tuple(one.own.tokens[one.known :]) for one in held]

    def _unread(self, held: list[HeadSequence]) -> list[Chunk]:
        """Returns chunks of at most CATCH_UP rows that must be computed before drafts, and gives the model their
        features.

        Sequences with few such rows go first, so that a long prompt delays no other sequence.
        """
        budget, chunks, hidden = CATCH_UP, list[Chunk](), list[Tensor]()
        for one in sorted(held, key=lambda one: one.unread_rows):
            length = min(one.unread_rows, budget)
            if length:
                chunks.append(Chunk(one.own, one.own.computed_tokens, length, length == one.unread_rows))
                hidden.append(one.take(length))
                budget -= length
        given = self._model.given[: CATCH_UP - budget]
        if chunks and self._captured is None:
            given.copy_(self.head.features(torch.cat(hidden)))
        elif chunks:
            torch.cat(hidden, out=given)
        return chunks


def _next_chunk(own: Sequence) -> Chunk:
    """Returns the chunk of the last draft, which may not be known yet."""
    return Chunk(own, len(own.tokens) + own.pending_outputs - 1, 1, True)


# Quantizes the output head over the vocabulary to four bits, for drafts only.
#
# The output head is most of the memory that a draft head reads. If the rounding changes a draft, only the guess is
# wrong, and no answer changes. The served model keeps its own output head.

LAYOUT = Layout(INT4, 128)
SMALL = 16 << 20  # bytes; a head up to this size may stay in the processors' caches, so a copy would not help


def pays(shape: Shape, layout: Layout | None, dtype: torch.dtype, device: Device = "cpu") -> bool:
    """Whether a 4-bit copy of an output head [vocab, H] speeds drafts up. layout: the head's own format, or None."""
    bits = 8 * dtype.itemsize if layout is None else layout.code_map.bits
    large = torch.Size(shape).numel() * bits // 8 > SMALL
    return large and bits > LAYOUT.code_map.bits and (torch.device(device).type == "cuda" or c_library.available(dtype))


def pack(head: Tensor | QuantizedWeight, dtype: torch.dtype) -> PackedLinear:
    """Packs a 4-bit copy of an output head [vocab, H]."""
    plain = head.dequantize(dtype) if isinstance(head, QuantizedWeight) else head
    return pack_stacked([LAYOUT.quantize(plain)], dtype=dtype, invariant=True)
