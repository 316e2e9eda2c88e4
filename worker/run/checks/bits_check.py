"""Checks before serving that, on this device, the bits of a row do not depend on other rows (batch invariance).

All kernels are designed for this. But they rely on matrix instructions that add in the same order for every tile size,
and no maker of GPUs guarantees this order. The check therefore runs a sequence through the first layers of the loaded
model in several ways: alone and with others, in one chunk, in several chunks, and as a decode. Its logits, K/V and
recurrent states must have the same bits every time.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.config import WorkerConfig
from worker.kernels.operations import TORCH
from worker.kv_cache.tensors import KVCache
from worker.model.decoder import Decoder
from worker.run.checks.check_inputs import advance, cache_for, first_layers, sequences_of
from worker.run.checks.kernel_check import summary
from worker.run.inputs import build_inputs, to_device
from worker.run.warmup import GREEDY, StepLimits
from worker.schedule.records.sequence_states import slots_of
from worker.schedule.sequence import Chunk, Sequence

log = logging.getLogger("sluice.load")

LENGTH = 1219  # tokens of the sequence: enough that attention splits the keys several times
LEAST_LAYERS = 2  # the K/V of the second layer depends on everything that the first layer computes
BESIDE_DECODES = (16, 64)  # numbers of rows in a step of decodes
BESIDE_CHUNK = (17, 65, 129)  # numbers of rows in a step with one decode and a prompt chunk


def keeps_bits(decoder: Decoder, worker: WorkerConfig, length: int, device: str) -> bool:
    """Whether a request gets the same bits in every kind of step that the check tries. Logs one warning if not.

    length: the length of the longest sequence. device: the name of the GPU.
    """
    if decoder.operations is TORCH or not worker.batch_invariant:
        return False
    try:
        differing = find_differing_steps(decoder, worker, length)
    except Exception as error:
        log.warning(
            "cannot check on %s whether an answer depends on what else is computed, so it may (%s)",
            device, summary(error),
        )  # fmt: skip
        return False
    if differing:
        log.warning(
            "ANSWERS MAY DEPEND ON THE LOAD: on %s a row has other bits %s. They are as exact as ever, but the same "
            "request may get another answer when other requests are computed beside it", device, ", ".join(differing),
        )  # fmt: skip
    return not differing


@torch.inference_mode()
def find_differing_steps(decoder: Decoder, worker: WorkerConfig, length: int) -> list[str]:
    """Returns the kinds of steps in which a sequence gets other bits than when it is computed alone in one chunk."""
    limits = StepLimits.of(worker, length)
    small = first_layers(decoder, min(length, LENGTH), decoder.operations, LEAST_LAYERS)
    kinds = [(LENGTH, GREEDY), (max(BESIDE_CHUNK) - 1, GREEDY), *[(1, GREEDY)] * (max(BESIDE_DECODES) - 1)]
    sequences = sequences_of(kinds, limits, decoder.spec.vocab_size)
    cache = cache_for(sequences, small, worker, limits.page_size)
    variants = _Variants(small, cache, limits, sequences[0], sequences[1], sequences[2:])
    alone = variants.run([], [])
    return [name for name, cuts, beside in variants.kinds() if not _same(variants.run(cuts, beside), alone)]


@dataclass(frozen=True, slots=True)
class _Variants:
    """Computes the sequence `one` in several ways, with `prompt` and `shorts` as other sequences in its steps."""

    decoder: Decoder
    cache: KVCache
    limits: StepLimits
    one: Sequence
    prompt: Sequence
    shorts: list[Sequence]

    def kinds(self) -> Iterator[tuple[str, list[int], list[Chunk]]]:
        """Yields each way: its name, the positions that cut the sequence into chunks, other chunks of its last step."""
        length = len(self.one.tokens)
        yield "when it is computed again", [], []
        yield "in several chunks", [1, length // 5, length // 5 + 1, length - 7], []
        yield "as a decode", [length - 1], []
        most = min(self.limits.sequences, self.limits.tokens)
        for rows in sorted({min(rows, most) for rows in BESIDE_DECODES} - {1}):
            company = [Chunk(short, 0, 1, True) for short in self.shorts[: rows - 1]]
            yield f"as a decode beside {rows - 1} others", [length - 1], company
        most = min(self.limits.tokens, len(self.prompt.tokens) + 1)
        for rows in sorted({min(rows, most) for rows in BESIDE_CHUNK} - {1}):
            company = [Chunk(self.prompt, 0, rows - 1, True)]
            yield f"as a decode beside {rows - 1} tokens of a prompt", [length - 1], company
            yield f"as a chunk beside {rows - 1} tokens of a prompt", [length - min(length, 40)], company

    def run(self, cuts: list[int], company: list[Chunk]) -> list[Tensor]:
        """Computes the sequence `one` from its start. Returns its logits, K/V and states. company: see kinds()."""
        for sequence in (self.one, self.prompt, *self.shorts):
            sequence.computed_tokens = 0
            states = slots_of(sequence)
            states.free += states.at.values()
            states.at.clear()
        length = len(self.one.tokens)
        ends = sorted({*(cut for cut in cuts if 0 < cut < length), *range(0, length, self.limits.tokens), length} - {0})
        for end in ends:
            last = company if end == length else []
            logits = self._step(Chunk(self.one, self.one.computed_tokens, end - self.one.computed_tokens, True), last)
        return [logits, *self._kept()]

    def _step(self, own: Chunk, company: list[Chunk]) -> Tensor:
        """Computes a step, with `own` between decodes and prompts. Returns the logits [vocab] of `own`."""
        after = [chunk for chunk in company if chunk.sequence is self.prompt]
        chunks = [*(chunk for chunk in company if chunk.sequence is not self.prompt), own, *after]
        inputs, _ = build_inputs(chunks, self.limits.page_size, self.cache.device, recurrent=bool(self.cache.states))
        logits = self.decoder.forward(inputs, self.cache)[chunks.index(own)].clone()
        for chunk in chunks:
            advance(chunk)
        return logits

    def _kept(self) -> Iterator[Tensor]:
        """Yields the K/V of the sequence in all layers, and its recurrent states."""
        one = self.one
        pages = to_device(np.array(one.pages[0], np.int64), self.cache.device)
        for part in (*self.cache.k, *self.cache.v):
            yield part.view(torch.uint8)[:, pages].flatten(1, 2)[:, : len(one.tokens)]
        for state in self.cache.states.values():
            yield state.tail[slots_of(one).at[len(one.tokens)]].clone()
            yield state.memory[slots_of(one).at[len(one.tokens)]].clone()


def _same(bits: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for one, other in zip(bits, expected, strict=True)
    )
