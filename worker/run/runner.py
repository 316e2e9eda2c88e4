"""One forward per step: pack the plan, run the model, sample every row that reached its end.

Knows tensors and plans; decides nothing. The same path for prefill, chunk and decode.
"""

import numpy as np
import torch
from torch import Tensor

from shared.messages import Sampling
from worker.kv_cache.tensors import Cache
from worker.model.decoder import Decoder
from worker.run.grammar_mask import GrammarMask
from worker.run.graphs import Eager, Graphs, Recorder, cuda_recorder
from worker.run.in_flight import HostCopy, InFlightStep, StepOutput
from worker.run.inputs import build_inputs, dummy_sequence, pending_tokens, to_device
from worker.run.logprobs import launch_logprobs
from worker.run.sampler import choose, is_plain
from worker.schedule.sequence import Chunk, Plan


class DeviceBroken(Exception):
    """It cannot even compute a step that is nobody's, so it cannot compute anybody's."""


class Runner:
    """A model and its K/V pool on one device.

    `overlap`: a step whose rows are sampled by their logits alone may be followed before it is read. `graphs`: decodes
    of up to `max_batch_size` such rows are recorded and replayed; on the CPU they are computed anew, as a replay would.
    """

    def __init__(
        self, model: Decoder, cache: Cache, *, overlap: bool = False, graphs: bool = False, max_batch_size: int = 64
    ) -> None:
        self._model = model
        self._cache = cache
        self._forward = model.on(cache)
        self._device = cache.k.device
        self._constrainer = GrammarMask(model.spec.vocab_size, model.spec.eos_ids)
        self._overlap = overlap
        self._graphs = self._recording(max_batch_size) if graphs else None

    def _recording(self, max_batch_size: int) -> Graphs:
        record: Recorder = Eager
        if self._device.type == "cuda":
            record = cuda_recorder()
        return Graphs(
            self._forward, record, page_size=self._cache.page_size, max_batch_size=max_batch_size,
            max_seq_len=len(self._model.ropes[0][0]), device=self._device, count_replayed=self._model.count_replayed,
        )  # fmt: skip

    def step(self, plan: Plan) -> StepOutput:
        """Compute the plan's chunks; raises whatever the device raises, having changed no sequence."""
        return self.launch(plan).read()

    @torch.inference_mode()
    def launch(self, plan: Plan, before: InFlightStep | None = None) -> InFlightStep:
        """Have the plan's chunks computed; tokens that nobody knows yet are what `before`, the last step, samples."""
        if self._graphs is not None and self._graphs.take(plan):
            return self._graphs.launch(plan, before, ahead=self._overlap)
        inputs, wanted = build_inputs(plan.chunks, self._cache.page_size, self._device)
        self._cache.reach(inputs.max_page)
        if before is not None:
            self._fill_in(inputs.token_ids, plan, before)
        logits = self._forward(inputs)  # [R, V] float32
        sampled = logits
        if len(wanted.sampled) < len(logits):
            sampled = logits[to_device(np.array(wanted.sampled, np.int64), self._device)]
        rows = plan.rows
        sequences = [sequence for sequence, _ in rows]
        allowed = self._constrainer.apply(sampled, sequences)
        eos_ids, choose_plain = self._model.spec.eos_ids, self._model.operations.sample_plain
        ids = choose(allowed, rows, eos_ids, choose_plain) if rows else logits.new_empty(0).long()
        if any(sequence.sampling.logprobs is not None for sequence in sequences) or wanted.prompts:
            return InFlightStep(plan, False, ids, HostCopy(ids), launch_logprobs(plan, wanted, logits, sampled, ids))
        ahead = self._overlap and not plan.drafts and all(map(is_plain, sequences))
        return InFlightStep(plan, ahead, ids, HostCopy(ids))

    def _fill_in(self, tokens: Tensor, plan: Plan, before: InFlightStep) -> None:
        rows, sources = pending_tokens(plan.chunks, before.plan.chunks)
        if rows:
            at, source = to_device(np.array([rows, sources]), self._device)
            tokens.index_copy_(0, at, before.ids[source])

    def check_device(self) -> None:
        """One step for nobody: a token computed in the scratch page. Raises DeviceBroken, or hangs, if it cannot be."""
        sequence = dummy_sequence([0], self._cache.page_size, Sampling(1, temperature=0.0))
        try:
            self.step(Plan([Chunk(sequence, 0, 1, True)]))
        except Exception as error:
            raise DeviceBroken(f"{self._device} cannot compute: {type(error).__name__}: {error}") from error

    @property
    def layers(self) -> int:
        """How many were begun in all steps so far, those of a step that runs now too: a long step is no hanging one."""
        return int(self._model.done.value)
