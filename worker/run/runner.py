"""Runs one forward per step: builds the inputs, runs the model, and samples the rows that need a next token.

The runner works on tensors and plans and makes no decisions. Prefill, chunked prefill and decode take the same path.
"""

from collections.abc import Callable
from ctypes import c_uint64
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shared.messages import Sampling
from worker.kernels.operations import Operations
from worker.kv_cache.tensors import KVCache
from worker.model.forward_inputs import ForwardInputs
from worker.model.spec import ModelSpec
from worker.run.grammar_mask import GrammarMask
from worker.run.graph_capture import EagerGraph, cuda_capture
from worker.run.graphs import DecodeGraphs
from worker.run.in_flight import HostCopy, InFlightStep, PooledRows, StepOutput, no_rows
from worker.run.inputs import LogitsUse, build_inputs, dummy_sequence, pending_tokens, to_device
from worker.run.logprobs import launch_logprobs
from worker.run.pooling import launch_pooling
from worker.run.sampler import is_plain, sample_rows
from worker.schedule.sequence import Chunk, Plan, Row

# Rows sampled together if answers are checked. A row needs several arrays as long as the vocabulary, and on the CPU
# sampling is four times as fast while those of all rows fit in the caches.
CHECKED_ROWS, CHECKED_ROWS_CPU = 64, 8


class Model(Protocol):
    """The interface of model/decoder.py and model/cpu_decoder.py."""

    spec: ModelSpec
    operations: Operations
    max_positions: int
    layers_started: c_uint64

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> Tensor: ...
    def hidden(self, inputs: ForwardInputs, cache: KVCache) -> Tensor: ...
    def logits(self, h: Tensor) -> Tensor: ...
    def count_replayed(self) -> None: ...


class DeviceBroken(Exception):
    """The device cannot compute even a dummy step, so it is unusable."""


class Runner:
    """Runs the steps of a model, with its K/V pool, on one device.

    overlap: whether a step may be launched before the last one is read, if all rows of the last one are sampled from
    unadjusted logits.
    graphs: whether decodes of up to `max_batch_size` rows with unadjusted logits are captured as CUDA graphs and
    replayed. On the CPU, a replay computes the decode again.
    """

    def __init__(
        self, model: Model, cache: KVCache, *, overlap: bool = False, graphs: bool = False, max_batch_size: int = 64
    ) -> None:
        self._model = model
        self._cache = cache
        self._device = cache.device
        self._grammar_mask = GrammarMask(model.spec.vocab_size, model.spec.eos_ids)
        self._overlap = overlap
        self._graphs = self._decode_graphs(max_batch_size) if graphs else None

    def _decode_graphs(self, max_batch_size: int) -> DecodeGraphs:
        return DecodeGraphs(
            self._forward, cuda_capture() if self._device.type == "cuda" else EagerGraph,
            page_size=self._cache.page_size, groups=len(self._cache.groups), recurrent=bool(self._cache.states),
            max_batch_size=max_batch_size, max_seq_len=self._model.max_positions, device=self._device,
            count_replayed=self._model.count_replayed,
        )  # fmt: skip

    def _forward(self, inputs: ForwardInputs) -> Tensor:
        return self._model.forward(inputs, self._cache)

    def step(self, plan: Plan) -> StepOutput:
        """Computes the chunks of a plan. Raises whatever the device raises. Never changes a sequence."""
        return self.launch(plan).read()

    @torch.inference_mode()
    def launch(self, plan: Plan, before: InFlightStep | None = None) -> InFlightStep:
        """Launches the chunks of a plan. Tokens that the host does not know yet come from the ids of step `before`."""
        if self._graphs is not None and self._graphs.accepts(plan):
            return self._graphs.launch(plan, before, may_overlap=self._overlap)
        inputs, use = build_inputs(plan.chunks, self._cache.page_size, self._device, recurrent=bool(self._cache.states))
        self._cache.reach(inputs.max_pages)
        if before is not None:
            self._fill_pending(inputs.token_ids, plan, before)
        logits, pooled = self._outputs(inputs, plan, use)
        sampled = logits
        if len(use.sampled) < len(logits):
            sampled = logits[to_device(np.array(use.sampled, np.int64), self._device)]
        rows = plan.rows
        sequences = [sequence for sequence, _ in rows]
        ids = self._sample(sampled, rows) if rows else logits.new_empty(0).long()
        if any(sequence.sampling.logprobs is not None for sequence in sequences) or use.prompts:
            logprobs = launch_logprobs(plan, use, logits, sampled, ids)
            return InFlightStep(plan, False, ids, HostCopy(ids), logprobs, pooled)
        may_overlap = self._overlap and not plan.drafts and all(map(is_plain, sequences))
        return InFlightStep(plan, may_overlap, ids, HostCopy(ids), read_pooled=pooled)

    def _outputs(
        self, inputs: ForwardInputs, plan: Plan, use: LogitsUse
    ) -> tuple[Tensor, Callable[[], list[PooledRows]]]:
        """Returns the logits [N, V] float32 of the rows that have logits, and a function that reads the other rows."""
        if not use.pooled:
            return self._forward(inputs), no_rows
        hidden, model = self._model.hidden(inputs, self._cache), self._model
        rows = to_device(use.with_logits(len(hidden)), self._device)
        return model.logits(hidden[rows]), launch_pooling(plan, use, hidden, model.logits)

    def _sample(self, logits: Tensor, rows: list[Row]) -> Tensor:
        allowed, spec, kernel = self._grammar_mask.apply(logits, rows), self._model.spec, self._model.operations
        checks = any(sequence.answer is not None for sequence, _ in rows)
        most = CHECKED_ROWS_CPU if self._device.type == "cpu" else CHECKED_ROWS
        size = min(most, len(rows)) if checks else len(rows)
        parts = [slice(first, first + size) for first in range(0, len(rows), size)]
        ids = [sample_rows(allowed[part], rows[part], spec.eos_ids, kernel.sample_plain) for part in parts]
        return ids[0] if len(ids) == 1 else torch.cat(ids)

    def _fill_pending(self, token_ids: Tensor, plan: Plan, before: InFlightStep) -> None:
        rows, sources = pending_tokens(plan.chunks, before.plan.chunks)
        if rows:
            at, source = to_device(np.array([rows, sources]), self._device)
            token_ids.index_copy_(0, at, before.ids[source])

    def check_device(self) -> None:
        """Runs a dummy step of one token in the scratch page. If the device is broken, raises DeviceBroken or hangs."""
        cache = self._cache
        sequence = dummy_sequence([0], cache.page_size, len(cache.groups), Sampling(1, temperature=0.0))
        try:
            self.step(Plan([Chunk(sequence, 0, 1, True)]))
        except Exception as error:
            raise DeviceBroken(f"{self._device} cannot compute: {type(error).__name__}: {error}") from error

    @property
    def layers_started(self) -> int:
        """How many layers all steps, including the running one, have started. It tells a long step from a hang."""
        return int(self._model.layers_started.value)
