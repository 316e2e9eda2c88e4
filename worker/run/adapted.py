"""Prepares steps with LoRA adapters, pictures or a drafter that reads hidden states.

The modules of these features are imported only by the first such step.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from worker.kernels.operations import Operations
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.run.inputs import lay_out
from worker.run.model import Forward, Model, Pipeline
from worker.schedule.records.adapter_use import has_adapters
from worker.schedule.sequence import Chunk, Plan

if TYPE_CHECKING:
    from worker.run.drafters.hidden_rows import Reader
    from worker.vision.vision import Vision


M = TypeVar("M", Model, Pipeline)


def reads_pictures(plan: Plan) -> bool:
    """Whether a chunk of the step may have tokens of a picture. Only such a step cannot be replayed as a graph."""
    pictures = [(chunk.start, chunk.sequence.pictures) for chunk in plan.chunks]
    return any([each is not None and start < each.end for start, each in pictures])


def has_pictures(plan: Plan) -> bool:
    """Whether a chunk of the step may have tokens of a picture, or positions that depend on a picture."""
    pictures = [(chunk.start, chunk.sequence.pictures) for chunk in plan.chunks]
    return any([each is not None and (start < each.end or each.rotary is not None) for start, each in pictures])


def model_for(model: Model, plan: Plan, inputs: ForwardInputs, reader: "Reader | None") -> Forward:
    """Returns the model that computes a step: with its adapters, and with a drafter that reads its hidden states.

    It is `model` itself if no sequence has an adapter, and no drafter reads.
    """
    step = None if reader is None else reader.reads(inputs, plan)
    if step is None:
        return _adapted(model, plan, inputs)
    from worker.run.drafters.hidden_rows import ReadModel

    return ReadModel(_adapted(model, plan, step.inputs), step)


def begun_by(pipeline: Pipeline, plan: Plan, inputs: ForwardInputs, reader: "Reader | None") -> Forward:
    """Begins a step in a pipeline. Returns what computes the rest, see Pipeline.begin and model_for."""
    step = None if reader is None else reader.reads(inputs, plan)
    if step is None:
        return _adapted(pipeline, plan, inputs).begin(inputs)
    from worker.run.drafters.hidden_rows import ReadModel

    return ReadModel(_adapted(pipeline, plan, step.inputs).begin(step.inputs), step)


def _adapted(model: M, plan: Plan, inputs: ForwardInputs) -> M:
    if not has_adapters(plan):
        return model
    adapted: M = model.with_operations(operations_of(model.operations, plan.chunks, inputs))
    return adapted


def operations_of(plain: Operations, chunks: Sequence[Chunk], inputs: ForwardInputs) -> Operations:
    """Returns the operations of a step whose chunks have adapters. Does not wait for a GPU."""
    from worker.adapters.operations import operations_with_adapters

    on_gpu = inputs.logits_indices.is_cuda
    return operations_with_adapters(
        plain, chunks, inputs, torch.from_numpy(lay_out(chunks, 1)[0].logits_indices) if on_gpu else None
    )


def inputs_for(inputs: ForwardInputs, plan: Plan, vision: "Vision | None") -> ForwardInputs:
    """Returns the inputs of a step, with the vectors of its pictures. Encodes pictures that are not encoded yet."""
    if vision is None or not has_pictures(plan):  # without a tower, no sequence with pictures is admitted
        return inputs
    from worker.vision.step import with_pictures

    return with_pictures(inputs, plan.chunks, vision)
