"""Options for GPU kernels: their names, and their values on a device."""

from unittest.mock import patch

import pytest
import torch

from shared.config.worker import GPU_OPTIONS as FLAG_VALUES
from worker.operations import FAST, OperationsWithFusedNorms, with_options
from worker.ops.launch_options import GPU_OPTIONS, NO_OPTIONS, GpuOptions, options_named

CUDA = torch.device("cuda")


def test_flag_accepts_exactly_the_options() -> None:
    assert FLAG_VALUES == GPU_OPTIONS
    assert options_named([*GPU_OPTIONS]).names == GPU_OPTIONS and options_named([]) == NO_OPTIONS


@pytest.mark.parametrize(("capability", "kept"), [((8, 9), ()), ((9, 0), ("pdl", "weight_prefetch"))])
def test_dependent_launch_needs_compute_capability_9(capability: tuple[int, int], kept: tuple[str, ...]) -> None:
    with patch.object(torch.cuda, "get_device_capability", lambda device: capability):
        assert GpuOptions(pdl=True, weight_prefetch=True).on(CUDA).names == kept


@pytest.mark.parametrize(("capability", "kept"), [((8, 9), False), ((9, 0), True), ((10, 0), False)])
def test_softmax_overlap_needs_hopper(capability: tuple[int, int], kept: bool) -> None:
    with patch.object(torch.cuda, "get_device_capability", lambda device: capability):
        assert GpuOptions(softmax_overlap=True).on(CUDA).softmax_overlap is kept


def test_weights_are_prefetched_only_before_a_wait() -> None:
    assert GpuOptions(weight_prefetch=True).on(torch.device("cpu")).names == ()


def test_counters_are_made_only_for_options_that_count() -> None:
    cpu = torch.device("cpu")
    assert GpuOptions(pdl=True).on(cpu).arrivals is None
    counters = GpuOptions(last_combine=True).on(cpu).arrivals
    assert counters is not None and not counters.any()


def test_norms_are_fused_only_with_their_option() -> None:
    fused = with_options(FAST, GpuOptions(fused_norms=True))
    assert isinstance(fused, OperationsWithFusedNorms) and fused.options.fused_norms
    assert not isinstance(with_options(FAST, GpuOptions(pdl=True)), OperationsWithFusedNorms)


def test_operations_without_options_are_the_same_objects() -> None:
    assert with_options(FAST, NO_OPTIONS) is FAST
    bound = with_options(FAST, GpuOptions(pdl=True))
    assert bound.linear.keywords["options"].pdl and bound.mamba2 is FAST.mamba2  # type: ignore[attr-defined]
