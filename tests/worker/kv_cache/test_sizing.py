"""Sizes in plain numbers: what a GPU leaves for the pool, and what is message when that is too little."""

from typing import Any

import pytest
import torch

from shared.config import ConfigError, ModelConfig, WorkerConfig
from shared.default_sizes import with_default_sizes
from tests.worker.kv_cache.harness import SPEC
from worker.kv_cache.sizing import (
    GIB,
    RESERVED_BYTES,
    GpuMemory,
    PoolBudget,
    PoolSize,
    configured_budget,
    longest_sequence,
    size_pool,
)
from worker.kv_cache.tensors import bytes_per_page

H200 = GpuMemory("NVIDIA H200", free=138 * GIB, total=140 * GIB, utilization=0.9)
CPU = torch.device("cpu")
A_TOKEN = bytes_per_page(SPEC, 1, torch.bfloat16, CPU)


def sized(tokens: int, max_seq_len: int = 0, **worker: Any) -> PoolSize:
    """The pool for a budget that holds so many tokens."""
    return size_pool(
        SPEC,
        torch.bfloat16,
        CPU,
        PoolBudget(tokens * A_TOKEN, "change something"),
        ModelConfig(max_seq_len=max_seq_len),
        with_default_sizes(WorkerConfig(**worker), on_gpu=False),
    )


def test_gpu_memory_available_is_its_share_less_what_is_in_use() -> None:
    assert H200.available == pytest.approx(124 * GIB)
    full = GpuMemory("full", free=10 * GIB, total=140 * GIB, utilization=0.9)
    assert full.available == 0, "the share of this worker is in use, by any process"
    whole = GpuMemory("whole", free=10 * GIB, total=140 * GIB, utilization=1.0)
    assert whole.available == 10 * GIB


def test_pool_budget_is_what_a_step_graphs_and_the_reserve_leave() -> None:
    assert H200.pool_budget(step=3 * GIB, graphs=1 * GIB).nbytes == H200.available - 4 * GIB - RESERVED_BYTES
    assert H200.pool_budget(step=200 * GIB, graphs=0).nbytes == 0


def test_check_weights_that_do_not_fit_raises_one_sentence() -> None:
    H200.check_weights(H200.available)
    with pytest.raises(ConfigError) as caught:
        H200.check_weights(150 * GIB)
    message = str(caught.value)
    assert (
        "150.00 GiB" in message
        and "124.00 GiB" in message
        and "138.00 of 140.00 GiB" in message
        and "\n" not in message
    )
    assert "NVIDIA H200" in message and "--gpu-memory-utilization is 0.9" in message


def test_size_pool_is_the_budget_or_what_all_sequences_need() -> None:
    assert sized(6 * 16, max_seq_len=32, page_size=16) == PoolSize(6, 16, 32)
    assert sized(10**6, max_seq_len=32, page_size=16, max_batch_size=4) == PoolSize(4 * 2 + 1, 16, 32)


def test_size_pool_shortens_a_length_that_was_not_configured() -> None:
    assert sized(3 * 16, page_size=16) == PoolSize(3, 16, 32), "one page is scratch"
    assert sized(10**6, page_size=16).max_seq_len == SPEC.max_positions


@pytest.mark.parametrize(
    ("tokens", "how"),
    [
        (2 * 16, {"max_seq_len": 32, "page_size": 16}),
        (16, {"page_size": 16}),
        (0, {"page_size": 16}),
        (64, {"kv_cache_backend": "contiguous"}),
    ],
)
def test_size_pool_without_room_for_one_sequence_raises_with_the_remedy(tokens: int, how: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"does not hold one sequence of \d+ tokens .* GiB\): change something"):
        sized(tokens, **how)


def test_pool_budget_remedy_names_the_gpu_and_the_flags() -> None:
    small = GpuMemory("Tiny GPU", free=GIB, total=2 * GIB, utilization=0.6)
    budget = small.pool_budget(step=GIB // 4, graphs=0)
    assert budget.nbytes == 0
    for word in ("Tiny GPU", "a step takes 0.25 GiB", "--gpu-memory-utilization", "--max-step-tokens", "--max-seq-len"):
        assert word in budget.remedy


def test_longest_sequence_beyond_the_model_raises() -> None:
    with pytest.raises(ConfigError, match="--max-seq-len 65 is more than the model's 64"):
        longest_sequence(SPEC, ModelConfig(max_seq_len=65), WorkerConfig())


def test_configured_budget_is_the_flag() -> None:
    assert configured_budget(WorkerConfig(kv_cache_gb=0.5)).nbytes == GIB // 2
    assert configured_budget(WorkerConfig()).nbytes > 0, "a share of what is free here"
