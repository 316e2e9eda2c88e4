"""Runs one forward per step: builds the inputs, runs the model, and samples the rows that need a next token.

The runner works on tensors and plans and makes no decisions. Prefill, chunked prefill and decode take the same path.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from shared.messages import Sampling
from worker.kv_cache.tensors import KVCache
from worker.model_runner.inputs import LogitsUse, build_inputs, dummy_sequence, pending_tokens, prepare_batch, to_device
from worker.model_runner.sampler import check_drawn, is_plain, sample_rows
from worker.model_runner.step import (
    AnyStep,
    HostCopy,
    InFlightStep,
    ReadPooled,
    StepOutput,
    UnfinishedStep,
    no_rows,
)
from worker.models.forward_inputs import Forward, ForwardInputs, Model, Pipeline
from worker.operations import Operations
from worker.scheduler.sequence import NO_ID, Chunk, Plan, Row, has_adapters
from worker.spec import ModelSpec

if TYPE_CHECKING:
    from worker.model_runner.cuda_graph_adapters import GraphAdapters
    from worker.model_runner.cuda_graph_inputs import Shapes
    from worker.model_runner.cuda_graphs import StepGraphs
    from worker.model_runner.grammar_mask import GrammarMask
    from worker.model_runner.hidden_states import Reader
    from worker.vision.vision import Vision


# The number of rows that are sampled together if answers are checked. A row needs several arrays as long as the
# vocabulary, and on the CPU, sampling is three times as fast if the arrays of all rows fit in the caches.
CHECKED_ROWS = 64
PART_LOGITS_CPU = 1 << 20  # logits that are sampled together on the CPU


class DeviceBroken(Exception):
    """The device cannot compute even a dummy step, so it is unusable."""


@dataclass(frozen=True, slots=True)
class _Computed:
    """The results of a step's forward: its logits, and the ids if they are sampled already."""

    logits: Tensor  # [N, V] float32: the logits of all rows that have logits
    use: LogitsUse
    sampled: Tensor  # [R, V]: the logits of plan.rows
    ids: Tensor | None = None  # [R] int64
    read_pooled: ReadPooled = no_rows


class Runner:
    """Runs the steps of a model, with its K/V pool, on one device.

    overlap: whether a step may be launched before the previous step is read, if all rows of the previous step are
    sampled from unadjusted logits.
    graphs: whether steps of up to `max_batch_size` sequences and `max_step_tokens` tokens are captured as CUDA graphs
    and replayed. On the CPU, a replay computes the step again.
    max_loras: the most pairs of an adapter and a scale in a captured step.
    batch_invariant: whether the bits of a row do not depend on the rest of the step. vision: encodes images.
    """

    cuts_prompts = True  # a prompt may be computed in parts, see StepRunner

    def __init__(
        self, model: Model, cache: KVCache, *, overlap: bool = False, graphs: bool = False, max_batch_size: int = 64,
        max_step_tokens: int = 512, max_loras: int = 8, batch_invariant: bool = True, vision: "Vision | None" = None,
    ) -> None:  # fmt: skip
        self._model, self._cache, self._device, self.vision = model, cache, cache.device, vision
        self.hidden_reader: Reader | None = None  # a drafter that reads hidden states; set it before capture_graphs()
        self.pipeline: Pipeline | None = None  # the model, if its layers are cut into stages
        self._grammar_mask: GrammarMask | None = None  # made when it is first needed
        self._overlap = overlap
        self._rows_done = 0  # rows with chains of samplers, and parts of checked answers, in all steps
        self._graphs: StepGraphs | None = None
        if graphs:
            from worker.model_runner.cuda_graphs import step_graphs

            self._graphs = step_graphs(
                model, cache, self._forward, partial(self._graph_adapters, max_loras), max_batch_size=max_batch_size,
                max_step_tokens=max_step_tokens, mrope=vision is not None and vision.components is not None,
                batch_invariant=batch_invariant,
            )  # fmt: skip

    def _graph_adapters(self, max_loras: int, shapes: "Shapes") -> "GraphAdapters":
        from worker.model_runner.cuda_graph_adapters import GraphAdapters

        return GraphAdapters(self._model, self._cache, shapes, max_loras, self._captured)

    @torch.inference_mode()
    def capture_graphs(self, on_progress: Callable[[], None]) -> None:
        """Captures the graphs of all shapes before serving, if memory suffices. Does nothing without graphs."""
        if self._graphs is not None:
            self._graphs.capture_all(self._free_bytes, on_progress)

    def _free_bytes(self) -> int:
        if self._device.type == "cpu":
            return sys.maxsize
        torch.cuda.empty_cache()  # memory that PyTorch keeps for later steps can become a graph's
        return torch.cuda.mem_get_info(self._device)[0]

    def _forward(self, inputs: ForwardInputs) -> Tensor:
        return self._captured(self._model, inputs)

    def _captured(self, model: Model, inputs: ForwardInputs) -> Tensor:
        """Computes the logits of a step whose inputs are at fixed addresses."""
        reader = self.hidden_reader
        return model.forward(inputs, self._cache) if reader is None else reader.captured(model, inputs, self._cache)

    def step(self, plan: Plan) -> StepOutput:
        """Computes the chunks of a plan. Catches no exception of the device. Never changes a sequence."""
        return self.launch(plan).read()

    @torch.inference_mode()
    def launch(self, plan: Plan, before: AnyStep | None = None) -> AnyStep:
        """Launches the chunks of a plan. Tokens that the host does not know yet come from the ids of step `before`."""
        rows, known = plan.rows, before if isinstance(before, InFlightStep) else None
        if (replayed := self._replay(plan, rows, known)) is not None:
            return self._finish(plan, rows, replayed)
        inputs, use = self._inputs(plan, known)
        reader = None if use.pooled else self.hidden_reader
        if self.pipeline is not None:
            begun = begun_by(self.pipeline, plan, inputs, reader)
            return UnfinishedStep(plan, self.pipeline.stages - 1, partial(self._run, begun, inputs, plan, rows, use))
        return self._run(model_for(self._model, plan, inputs, reader), inputs, plan, rows, use)

    def _finish(self, plan: Plan, rows: list[Row], done: _Computed) -> InFlightStep:
        """Samples the rows of a step that is computed, or is being computed on the device."""
        sequences = [sequence for sequence, *_ in rows]
        ids = done.ids
        if ids is None:
            ids = self._sample(done.sampled, rows) if rows else done.logits.new_empty(0).long()
        if self._device.type == "cpu":  # on a GPU, the host would have to wait for the ids
            check_drawn(done.sampled, ids)
        if any(sequence.sampling.logprobs is not None for sequence in sequences) or done.use.prompts:
            return self._with_logprobs(plan, rows, done, ids)
        may_overlap = self._overlap and not plan.drafts and all(map(is_plain, sequences))
        return InFlightStep(plan, int(may_overlap), ids, HostCopy(ids), read_pooled=done.read_pooled)

    def _with_logprobs(self, plan: Plan, rows: list[Row], done: _Computed, ids: Tensor) -> InFlightStep:
        from worker.model_runner.logprobs import launch_logprobs

        logprobs = launch_logprobs(plan, rows, done.use, done.logits, done.sampled, ids)
        return InFlightStep(plan, 0, ids, HostCopy(ids), logprobs, done.read_pooled)

    def _replay(self, plan: Plan, rows: list[Row], before: InFlightStep | None) -> _Computed | None:
        """Replays the step as a CUDA graph. Returns None if there is no graph for it."""
        if self._graphs is None or (self.vision is not None and reads_images(plan)):
            return None
        replayed = self._graphs.launch(plan, rows, before)
        if replayed is None:
            return None
        if self.hidden_reader is not None:
            self.hidden_reader.replayed(plan)
        logits, ids = replayed
        return _Computed(logits, LogitsUse(list(range(len(logits))), []), logits, ids)

    def _inputs(self, plan: Plan, before: InFlightStep | None) -> tuple[ForwardInputs, LogitsUse]:
        """Builds the inputs of a step on the device. before: the step in flight that samples tokens of this one"""
        inputs, use = build_inputs(plan.chunks, self._cache.page_size, self._device, recurrent=bool(self._cache.states))
        self._cache.reach(inputs.max_pages)
        if before is not None:
            inputs = self._with_pending(inputs, plan, before)
        return inputs_for(inputs, plan, self.vision), use

    def _run(self, model: Forward, inputs: ForwardInputs, plan: Plan, rows: list[Row], use: LogitsUse) -> InFlightStep:
        """Computes the forward of a step without a graph, picks the logits of `rows`, and samples them."""
        logits, pooled = self._outputs(model, inputs, plan, use)
        picks = len(use.sampled) < logits.shape[0]
        sampled = logits[to_device(np.array(use.sampled, np.int64), self._device)] if picks else logits
        return self._finish(plan, rows, _Computed(logits, use, sampled, read_pooled=pooled))

    def _outputs(self, model: Forward, inputs: ForwardInputs, plan: Plan, use: LogitsUse) -> tuple[Tensor, ReadPooled]:
        """Computes the forward. Returns the logits [N, V] float32, and a function that returns the pooled rows."""
        if not use.pooled:
            return model.forward(inputs, self._cache), no_rows
        from worker.model_runner.logprobs import launch_pooling

        hidden = model.hidden(inputs, self._cache)
        rows = to_device(use.with_logits(len(hidden)), self._device)
        return model.logits(hidden[rows]), launch_pooling(plan, use, hidden, model.logits)

    def _sample(self, logits: Tensor, rows: list[Row]) -> Tensor:
        """Samples an id for each row, [R] int64, within its constraint. NO_ID: the row cannot be sampled yet."""
        if any([sequence.constraint is not None for sequence, *_ in rows]):
            logits, unknown = self._masked(logits, rows)
            if unknown:
                ids = self._sample_masked(logits, rows)
                return ids.index_fill_(0, to_device(np.array(unknown), self._device), NO_ID)
        return self._sample_masked(logits, rows)

    def _sample_masked(self, logits: Tensor, rows: list[Row]) -> Tensor:
        on_cpu = self._device.type == "cpu"
        if any([sequence.check is not None or (on_cpu and sequence.host is not None) for sequence, *_ in rows]):
            return self._sample_in_parts(logits, rows)
        kernel = self._model.operations.sample_plain
        return sample_rows(logits, rows, self._model.spec.eos_ids, kernel, self._row_done)

    def _masked(self, logits: Tensor, rows: list[Row]) -> tuple[Tensor, list[int]]:
        """Returns the logits without the tokens that constraints forbid, and the rows that get no id (NO_ID)."""
        if self._grammar_mask is None:
            from worker.model_runner.grammar_mask import GrammarMask

            self._grammar_mask = GrammarMask(self._model.spec.vocab_size, self._model.spec.eos_ids)
        return self._grammar_mask.apply(logits, rows)

    def _sample_in_parts(self, logits: Tensor, rows: list[Row]) -> Tensor:
        """Samples the rows in parts, because a step that checks an answer has many rows. Notes how long a row took."""
        spec, kernel = self._model.spec, self._model.operations
        size = max(1, PART_LOGITS_CPU // spec.vocab_size) if self._device.type == "cpu" else CHECKED_ROWS
        ids = []
        for first in range(0, len(rows), size):
            part, began = rows[first : first + size], time.perf_counter()
            ids.append(
                sample_rows(logits[first : first + size], part, spec.eos_ids, kernel.sample_plain, self._row_done)
            )
            note_draws(part, time.perf_counter() - began)  # on a GPU, the time of the launch
            self._row_done()
        return ids[0] if len(ids) == 1 else torch.cat(ids)

    def _with_pending(self, inputs: ForwardInputs, plan: Plan, before: InFlightStep) -> ForwardInputs:
        """Returns the inputs with the tokens that only the device knows, from the ids of step `before`."""
        rows, sources = pending_tokens(plan.chunks, before.plan.chunks)
        if not rows:
            return inputs
        at, source = to_device(np.array([rows, sources]), self._device)
        inputs.token_ids.index_copy_(0, at, before.ids[source])
        return replace(inputs, sources=torch.full_like(inputs.token_ids, -1).index_copy_(0, at, source))

    @property
    def cache(self) -> KVCache:
        return self._cache

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def operations(self) -> Operations:
        return self._model.operations

    @property
    def graph_tokens(self) -> int:
        """The most tokens of a step that is replayed as a graph; 0 without graphs."""
        return 0 if self._graphs is None else self._graphs.most_tokens

    def check_device(self) -> None:
        """Runs a dummy step of one token in the scratch page. If the device is broken, raises DeviceBroken or hangs."""
        cache = self._cache
        sequence = dummy_sequence([0], cache.page_size, len(cache.groups), Sampling(1, temperature=0.0))
        try:
            self.step(Plan([Chunk(sequence, 0, 1, True)]))
        except FloatingPointError:  # the device computes; each request gets an error: the weights overflow
            return
        except Exception as error:
            raise DeviceBroken(f"{self._device} cannot compute: {type(error).__name__}: {error}") from error

    @property
    def layers_started(self) -> int:
        """How many layers all steps have started so far, and rows with chains and parts of checks they have done.

        The count grows during a long step, but not during a hang.
        """
        return int(self._model.layers_started.value) + self._rows_done

    def _row_done(self) -> None:
        self._rows_done += 1


def note_draws(rows: list[Row], seconds: float) -> None:
    """Records in each sequence how long one of its rows took, if `rows` were sampled together in `seconds`.

    Chains of samplers record their own times, so only the rest of the time is divided equally among the rows. A row of
    a checked answer gets an equal part of the whole time instead.
    """
    each = seconds / len(rows)
    chains = [one.host.chain for one, *_ in rows if one.host is not None and one.host.chained]
    draw = max(0.0, seconds - sum(chains)) / len(rows) if chains else each
    for one, *_ in rows:
        if (host := one.host) is None:
            continue
        if one.check is not None:
            host.checked = each
        elif host.draw:
            host.draw, host.drawn = draw, True


# Prepares steps with LoRA adapters, images or a drafter that reads hidden states.
#
# The modules of these features are imported only by the first such step.

M = TypeVar("M", Model, Pipeline)


def reads_images(plan: Plan) -> bool:
    """Whether a chunk of the step may have tokens of an image. Only such a step cannot be replayed as a graph."""
    images = [(chunk.start, chunk.sequence.images) for chunk in plan.chunks]
    return any([each is not None and start < each.end for start, each in images])


def has_images(plan: Plan) -> bool:
    """Whether a chunk of the step may have tokens of an image, or positions that depend on an image."""
    images = [(chunk.start, chunk.sequence.images) for chunk in plan.chunks]
    return any([each is not None and (start < each.end or each.rotary is not None) for start, each in images])


def model_for(model: Model, plan: Plan, inputs: ForwardInputs, reader: "Reader | None") -> Forward:
    """Returns the model that computes a step: with its adapters, and with a drafter that reads its hidden states.

    It is `model` itself if no sequence has an adapter, and no drafter reads.
    """
    step = None if reader is None else reader.reads(inputs, plan)
    if step is None:
        return _adapted(model, plan, inputs)
    from worker.model_runner.hidden_states import ReadModel

    return ReadModel(_adapted(model, plan, step.inputs), step)


def begun_by(pipeline: Pipeline, plan: Plan, inputs: ForwardInputs, reader: "Reader | None") -> Forward:
    """Begins a step in a pipeline. Returns what computes the rest, see Pipeline.begin and model_for."""
    step = None if reader is None else reader.reads(inputs, plan)
    if step is None:
        return _adapted(pipeline, plan, inputs).begin(inputs)
    from worker.model_runner.hidden_states import ReadModel

    return ReadModel(_adapted(pipeline, plan, step.inputs).begin(step.inputs), step)


def _adapted(model: M, plan: Plan, inputs: ForwardInputs) -> M:
    if not has_adapters(plan):
        return model
    adapted: M = model.with_operations(operations_of(model.operations, plan.chunks, inputs))
    return adapted


def operations_of(plain: Operations, chunks: Sequence[Chunk], inputs: ForwardInputs) -> Operations:
    """Returns the operations of a step whose chunks have adapters. Does not wait for a GPU."""
    from worker.lora.ops import operations_with_adapters

    on_gpu = inputs.logits_indices.is_cuda
    return operations_with_adapters(
        plain, chunks, inputs, torch.from_numpy(prepare_batch(chunks, 1)[0].logits_indices) if on_gpu else None
    )


def inputs_for(inputs: ForwardInputs, plan: Plan, vision: "Vision | None") -> ForwardInputs:
    """Returns the inputs of a step, with the vectors of its images. Encodes images that are not encoded yet."""
    if vision is None or not has_images(plan):  # without a tower, no sequence with images is admitted
        return inputs
    from worker.vision.vision import with_image_embeddings

    return with_image_embeddings(inputs, plan.chunks, vision)
