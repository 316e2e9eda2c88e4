"""Proposes drafts with a draft head: a layer that reads hidden states of the served model.

The row of the second-last token gives the first draft. Each further draft comes from the row of the draft before it.
That row reads the head's own output instead of a hidden state of the served model. A draft is sampled like the token
itself, with the same parameters, seed and position, so it is often right. Nothing here changes an answer.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from worker.kv_cache.pages import PagePool
from worker.kv_cache.tensors import KVCache
from worker.model.cpu_decoder import fastest_decoder
from worker.model.decoder import Decoder
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.run.drafters.drafter_base import PAGE_SIZE, CpuDrafter, page_count
from worker.run.drafters.head_sequences import HeadSequence, HeadSequences
from worker.run.drafters.hidden_rows import CONTEXT, HiddenStates, ReadStep, read_step
from worker.run.inputs import build_inputs
from worker.run.sampler import sample_rows
from worker.schedule.sequence import Chunk, Plan, Sequence
from worker.spec import ModelSpec


class Head(Protocol):
    """The weights and the input of a draft head (mtp_head.py, eagle_head.py). H: the hidden size of its layer.

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

    def features(self, hidden: Tensor) -> Tensor:
        """Returns the vectors [N, H] that the head reads for N tokens. hidden [N, W]: from the served model."""

    def inputs(self, inputs: ForwardInputs, features: Tensor) -> ForwardInputs:
        """Returns the inputs of the head's layer.

        inputs: the inputs of T rows. A row combines the features of a token with the id of the next token.
        features [T, H]: the vectors that the rows read
        """


class HeadDrafter(CpuDrafter):
    """Runs a draft head on the CPU. The runner calls it as `hidden_reader`, and Speculation as `proposer`.

    A sequence gets drafts only after the head has read all its hidden states.
    served: the spec of the served model. pool_bytes: the maximum memory for K/V, but always enough for one sequence.
    Sequences for which there is no room get no drafts.
    """

    def __init__(self, head: Head, served: ModelSpec, pool_bytes: int) -> None:
        decoder = head.decoder
        spec, dtype, self._longest = decoder.spec, decoder.weights.embed.dtype, decoder.max_positions
        pages = page_count(spec, dtype, self._longest, pool_bytes)
        self._cache = KVCache(spec, [pages], PAGE_SIZE, dtype, "cpu")
        self.head, self._model, self.name = head, fastest_decoder(decoder, self._cache), head.name
        self._own = HiddenStates(() if head.normed else (0,), spec.hidden_size, dtype)
        self._vocab_size = served.vocab_size
        self.sequences = HeadSequences(PagePool(pages, PAGE_SIZE))
        self.hidden_states = HiddenStates(head.layers, served.hidden_size, dtype)

    def reads(self, inputs: ForwardInputs, plan: Plan) -> ReadStep | None:
        """Returns a step of the served model that stores the hidden states of its sequences."""
        return None if self.failed else read_step(inputs, plan, self.hidden_states, self.sequences.read)

    def forget(self, target: Sequence) -> None:
        """Frees the memory of a sequence that has ended."""
        self.sequences.forget(target)

    @torch.inference_mode()
    def _propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        held = [self.sequences.get(target, count, self._longest) for target, count in wanted]
        chunks, hidden = self._unread([one for one in held if one is not None])
        features = self.head.features(hidden) if chunks else hidden
        ready = {chunk.sequence for chunk in chunks if chunk.samples}
        counts = {
            one: count for one, (_, count) in zip(held, wanted, strict=True) if one is not None and one.own in ready
        }
        by_own = {one.own: one for one in counts}
        drafted = 0
        while chunks:
            going = [by_own[chunk.sequence] for chunk in chunks if chunk.samples]
            features = self._draft(chunks, features, going)
            drafted += 1
            left = [at for at, one in enumerate(going) if counts[one] > drafted]
            features = features[left]
            chunks = [Chunk(going[at].own, len(going[at].own.tokens) - 1, 1, True) for at in left]
        return [() if one is None or one not in counts else tuple(one.own.tokens[one.known :]) for one in held]

    def _unread(self, held: list[HeadSequence]) -> tuple[list[Chunk], Tensor]:
        """Returns at most CONTEXT rows that must be computed before drafts, and their hidden states [N, W].

        Sequences with few such rows go first, so that a long prompt delays no other sequence.
        """
        budget, chunks, hidden = CONTEXT, [], [torch.empty((0, self.hidden_states.width))]
        for one in sorted(held, key=lambda one: one.unread_rows):
            length = min(one.unread_rows, budget)
            if length:
                chunks.append(Chunk(one.own, one.own.computed_tokens, length, length == one.unread_rows))
                hidden.append(one.take(length))
                budget -= length
        return chunks, torch.cat(hidden[1:] or hidden)

    def _draft(self, chunks: list[Chunk], features: Tensor, drafting: list[HeadSequence]) -> Tensor:
        """Computes rows, and adds a draft to each sequence in `drafting`. Returns the features [R, H] of the next rows.

        features: the vectors [N, H] that the rows read.
        """
        inputs, _ = build_inputs(chunks, PAGE_SIZE, self._cache.device)
        normed, following = self._own.of_step(self._model, self.head.inputs(inputs, features), self._cache)
        if drafting:
            rows = [(one.target, one.target.next_output + len(one.own.tokens) - one.known) for one in drafting]
            logits, model = self._of_vocabulary(self._model.logits(normed)), self._model
            ids = sample_rows(logits, rows, model.spec.eos_ids, model.operations.sample_plain).tolist()
            for one, id in zip(drafting, ids, strict=True):
                one.own.tokens.append(id)
        return following

    def _of_vocabulary(self, logits: Tensor) -> Tensor:
        """Converts the logits of the head's tokens [R, D] to logits of the served model's tokens [R, vocab]."""
        ids = self.head.target_ids
        if ids is None:
            return logits
        return logits.new_full((len(logits), self._vocab_size), -torch.inf).index_copy_(1, ids, logits)
