"""The ids of a launched step are copied before later work can overwrite them."""

import torch

from worker.model_runner.step import HostCopy, InFlightStep
from worker.scheduler.sequence import Plan


def test_host_copy_keeps_values_that_are_overwritten_later() -> None:
    values = torch.tensor([3, 4])
    copy = HostCopy(values)
    values.fill_(0)
    assert copy.read().tolist() == [3, 4]


def test_read_returns_ids_without_logprobs_by_default() -> None:
    ids = torch.tensor([5, 6])
    output = InFlightStep(Plan([]), 1, ids, HostCopy(ids)).read()
    assert output.ids == [5, 6] and output.logprobs == []
