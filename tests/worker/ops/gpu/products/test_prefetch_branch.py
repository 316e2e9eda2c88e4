"""Which weights are prefetched beside attention, and when."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from worker.ops.launch_options import NO_OPTIONS
from worker.ops.linear import triton_fused
from worker.ops.linear.triton_fused import first_bytes, prefetching

WEIGHTS = [torch.zeros(6, 4, dtype=torch.int8), torch.zeros(5, 8, dtype=torch.int8)]


class Stream:
    """A fake CUDA stream that records which streams it waits for."""

    def __init__(self, told: list[str], name: str) -> None:
        self._told, self.name = told, name

    def wait_stream(self, other: "Stream") -> None:
        self._told.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self._told.append(f"on {self.name}")

    def __exit__(self, *error: object) -> None:
        pass


@pytest.mark.parametrize(("most", "sizes"), [(100, [24, 40]), (30, [24, 6]), (24, [24]), (7, [7])])
def test_prefetched_weights_are_the_first_that_fit(most: int, sizes: list[int]) -> None:
    assert [size for _, size in first_bytes(WEIGHTS, most)] == sizes


@pytest.mark.parametrize("rows", [1, 65])
def test_branch_forks_and_joins_in_steps_of_few_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda weight, size, **constants: told.append(f"{grid[0]} programs, {size} elements")

    monkeypatch.setattr(triton_fused, "_prefetch_kernel", Kernel())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(told, "main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda one: one)
    options = replace(NO_OPTIONS, prefetch_branch=True, branch=Stream(told, "branch"))  # type: ignore[arg-type]
    with prefetching(rows, WEIGHTS, options):
        told.append("attention")
    branched = [
        "branch waits for main", "on branch", "1 programs, 24 elements", "1 programs, 40 elements", "attention",
        "main waits for branch",
    ]  # fmt: skip
    assert told == (branched if rows == 1 else ["attention"])
