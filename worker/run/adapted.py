"""The model of a step in which sequences have adapters: with operations that know them, imported by the first one."""

from typing import Any, Protocol, TypeVar

from worker.kernels.operations import Operations
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.schedule.sequence import Plan


class _Model(Protocol):
    @property
    def operations(self) -> Operations: ...
    def with_operations(self, operations: Operations) -> Any: ...


M = TypeVar("M", bound=_Model)


def has_adapters(plan: Plan) -> bool:
    return any([chunk.sequence.adapter is not None for chunk in plan.chunks])


def model_for(model: M, plan: Plan, inputs: ForwardInputs) -> M:
    """Returns the model that computes a step: the same one if no sequence has an adapter."""
    if not has_adapters(plan):
        return model
    from worker.adapters.operations import operations_with_adapters

    adapted: M = model.with_operations(operations_with_adapters(model.operations, plan.chunks, inputs))
    return adapted
