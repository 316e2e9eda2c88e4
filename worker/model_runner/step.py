"""The interface of runners (StepRunner), the launched steps that they return, and the results of steps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared import messages as m
from worker.scheduler.sequence import Plan, Sequence

StepLogprobs = list[tuple[Sequence, m.Logprobs]]
# (sequence, position of the first row, rows [N, D] that the prompt contributes to its vector)
PooledRows = tuple[Sequence, int, NDArray[np.float32]]
ReadPooled = Callable[[], list[PooledRows]]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a step: an id for each of plan.rows, in order, and log-probabilities and pooled rows, if any."""

    ids: list[int]
    logprobs: StepLogprobs = field(default_factory=list)
    pooled: list[PooledRows] = field(default_factory=list)


class HostCopy:
    """A copy of a tensor to the host, started by __init__. Later work in the same stream may overwrite the tensor."""

    def __init__(self, values: Tensor) -> None:
        self._event = torch.cuda.Event() if values.is_cuda else None  # type: ignore[no-untyped-call]
        if self._event is None:
            self._host = values.clone()
        else:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event.record()

    def read(self) -> Tensor:
        """Waits for the copy and returns it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def no_logprobs() -> StepLogprobs:
    return []


def no_rows() -> list[PooledRows]:
    return []


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step in flight. steps_behind: how many later steps may be launched before this one is read."""

    plan: Plan
    steps_behind: int
    ids: Tensor  # [R] int64 on the device, in the order of plan.rows; the next step reads them and may overwrite them
    host_ids: HostCopy
    read_logprobs: Callable[[], StepLogprobs] = no_logprobs
    read_pooled: ReadPooled = no_rows

    @torch.inference_mode()
    def read(self) -> StepOutput:
        """Waits for the step and returns its results. Catches no exception of the device."""
        ids: list[int] = self.host_ids.read().tolist()
        return StepOutput(ids, self.read_logprobs(), self.read_pooled())


@dataclass(frozen=True, slots=True)
class UnfinishedStep:
    """A step in flight whose last part, from the LM head on, is computed when it is read: see Pipeline in
    worker/models/forward_inputs.py.

    finish: computes this part. It reads the sequences of the step, which must be as they were at the launch.
    """

    plan: Plan
    steps_behind: int
    finish: Callable[[], InFlightStep]

    @torch.inference_mode()
    def read(self) -> StepOutput:
        """Waits for the step, finishes it, and returns its results. Catches no exception."""
        return self.finish().read()


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step that was complete when it was launched."""

    plan: Plan
    output: StepOutput
    steps_behind: int = 0

    def read(self) -> StepOutput:
        return self.output


AnyStep = InFlightStep | UnfinishedStep | ComputedStep


# The interface of a runner that the compute loop uses.


class StepRunner(Protocol):
    """Launches steps; worker/model_runner/runner.py and worker/encoder/encoder.py."""

    @property
    def cuts_prompts(self) -> bool:
        """Whether a prompt may be computed in parts."""

    def launch(self, plan: Plan, before: AnyStep | None = None) -> AnyStep:
        """Launches the chunks of a plan. Tokens that the host does not know yet come from the ids of step `before`."""

    def check_device(self) -> None:
        """Computes a dummy step. Raises DeviceBroken, or hangs, if the device is broken."""
