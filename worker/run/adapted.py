"""Prepares steps with LoRA adapters or pictures. The first such step imports the modules for adapters or pictures."""

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from worker.kernels.operations import Operations
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.schedule.sequence import Plan

if TYPE_CHECKING:
    from worker.vision.vision import Vision


class _Model(Protocol):
    @property
    def operations(self) -> Operations: ...
    def with_operations(self, operations: Operations) -> Any: ...


M = TypeVar("M", bound=_Model)


def has_adapters(plan: Plan) -> bool:
    return any([chunk.sequence.adapter is not None for chunk in plan.chunks])


def has_pictures(plan: Plan) -> bool:
    """Whether a chunk of the step may have tokens of a picture, or positions that depend on a picture."""
    pictures = [(chunk.start, chunk.sequence.pictures) for chunk in plan.chunks]
    return any([each is not None and (start < each.end or each.rotary is not None) for start, each in pictures])


def model_for(model: M, plan: Plan, inputs: ForwardInputs) -> M:
    """Returns the model that computes a step: one with adapters, or `model` itself if no sequence has an adapter."""
    if not has_adapters(plan):
        return model
    from worker.adapters.operations import operations_with_adapters

    adapted: M = model.with_operations(operations_with_adapters(model.operations, plan.chunks, inputs))
    return adapted


def inputs_for(inputs: ForwardInputs, plan: Plan, vision: "Vision | None") -> ForwardInputs:
    """Returns the inputs of a step, with the vectors of its pictures. Encodes pictures that are not encoded yet."""
    if vision is None or not has_pictures(plan):  # without a tower, no sequence with pictures is admitted
        return inputs
    from worker.vision.step import with_pictures

    return with_pictures(inputs, plan.chunks, vision)
