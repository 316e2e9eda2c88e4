"""A step under way: launched, its ids not read yet."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared import messages as m
from worker.schedule.sequence import Plan, Sequence


@dataclass(frozen=True, slots=True)
class StepOutput:
    """An id for each of the plan's rows, in their order, and the log-probabilities that were asked for."""

    ids: list[int]
    logprobs: list[tuple[Sequence, m.Logprobs]] = field(default_factory=list)


class HostCopy:
    """A tensor on its way to the host; what it was copied from may be written again by later work of its stream."""

    def __init__(self, values: Tensor) -> None:
        self._event = torch.cuda.Event() if values.is_cuda else None  # type: ignore[no-untyped-call]
        if self._event is None:
            self._host = values.clone()
        else:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event.record()

    def read(self) -> Tensor:
        """Waits until it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def nothing() -> list[tuple[Sequence, m.Logprobs]]:
    return []


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """`ahead`: the next step may be launched before this one is read."""

    plan: Plan
    ahead: bool
    ids: Tensor  # [R] int64 on the device, in the order of plan.rows; the next step reads them, and may write there
    host_ids: HostCopy
    logprobs: Callable[[], list[tuple[Sequence, m.Logprobs]]] = nothing

    @torch.inference_mode()
    def read(self) -> StepOutput:
        """Waits for it; raises whatever the device raises."""
        ids: list[int] = self.host_ids.read().tolist()
        return StepOutput(ids, self.logprobs())
