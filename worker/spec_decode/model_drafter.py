"""Proposes drafts with a draft model: a small model that has the vocabulary of the served model.

It has its own K/V cache, and drafts for all sequences at once. A draft is sampled like the token itself, with the same
parameters, seed and position, so it is accepted often at any temperature. Drafts are guesses and change no answer.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from worker.kv_cache.pages import PagePool
from worker.kv_cache.tensors import KVCache
from worker.model.cpu_decoder import fastest_decoder
from worker.model.decoder import Decoder
from worker.run.drafters.draft_sequences import SLOTS_EACH, DraftSequence, DraftSequences
from worker.run.drafters.drafter_base import PAGE_SIZE, CpuDrafter, page_count
from worker.run.inputs import build_inputs
from worker.run.sampler import sample_rows
from worker.schedule.sequence import TILE, Chunk, Sequence

CATCH_UP = 256  # the most tokens per step that the draft model computes to catch up, for example with a new prompt


class ModelDrafter(CpuDrafter):
    """Runs a draft model on the CPU. A sequence gets drafts only after the draft model has computed all its tokens.

    decoder: the decoder of the draft model. max_seq_len: the served model's. Sequences that are too long for the draft
    model get no drafts. pool_bytes: the maximum memory for K/V, but always enough for one sequence. Sequences for which
    there is no room get no drafts.
    """

    name = "the draft model"

    def __init__(self, decoder: Decoder, max_seq_len: int, pool_bytes: int) -> None:
        spec, dtype = decoder.spec, decoder.weights.embed.dtype
        self.longest = min(max_seq_len, decoder.max_positions)
        pages = page_count(spec, dtype, self.longest, pool_bytes)
        slots = 1 + TILE * SLOTS_EACH if spec.recurrent else 0
        self._cache = KVCache(spec, [pages], PAGE_SIZE, dtype, "cpu", state_slots=slots, state_dtype=dtype)
        self._model = fastest_decoder(decoder, self._cache)
        self.sequences = DraftSequences(PagePool(pages, PAGE_SIZE), PagePool(slots, PAGE_SIZE) if slots else None)

    def forget(self, target: Sequence) -> None:
        """Frees the memory of a sequence that has ended."""
        self.sequences.forget(target)

    @torch.inference_mode()
    def _propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        held = [self._follow(target, count) for target, count in wanted]
        ready = self._catch_up([one for one in held if one is not None])
        counts = {one: count for one, (_, count) in zip(held, wanted, strict=True) if one is not None and one in ready}
        for drafted in range(1, max(counts.values(), default=0)):
            going = [one for one, count in counts.items() if count > drafted]
            self._sample([Chunk(one.own, one.own.computed_tokens, 1, True) for one in going])
            for one in going:
                one.computed(one.own.computed_tokens + 1, known=False)
        ends = [len(target.tokens) for target, _ in wanted]
        return [
            tuple(one.own.tokens[end:]) if one is not None and one in counts else ()
            for one, end in zip(held, ends, strict=True)
        ]

    def _follow(self, target: Sequence, count: int) -> DraftSequence | None:
        end = len(target.tokens) + count
        held = self.sequences.get(target, end) if end <= self.longest else None
        if held is not None:
            held.follow(target.tokens)
        return held

    def _catch_up(self, held: Iterable[DraftSequence]) -> set[DraftSequence]:
        """Computes the tokens that are new since the last drafts. Returns the sequences that now have a first draft.

        Sequences with few new tokens go first, so that a long prompt delays no other sequence.
        """
        budget, chunks, ready, behind = CATCH_UP, [], set(), {}
        for one in sorted(held, key=lambda one: one.left):
            length = min(one.left, budget)
            if length:
                chunks.append(Chunk(one.own, one.own.computed_tokens, length, length == one.left))
                behind[one] = one.own.computed_tokens + length
                ready |= {one} if length == one.left else set()
                budget -= length
        if chunks:
            self._sample(chunks)
        for one, end in behind.items():
            one.computed(end, known=True)
        return ready

    def _sample(self, chunks: list[Chunk]) -> None:
        """Computes the chunks, and adds the sampled token to each sequence whose chunk samples."""
        inputs, _ = build_inputs(chunks, PAGE_SIZE, self._cache.device, recurrent=bool(self._cache.states))
        logits = self._model.forward(inputs, self._cache)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        if not sampling:
            return
        rows = [(own, own.next_output) for own in sampling]
        model = self._model
        ids = sample_rows(logits, rows, model.spec.eos_ids, model.operations.sample_plain).tolist()
        for own, id in zip(sampling, ids, strict=True):
            own.tokens.append(id)
