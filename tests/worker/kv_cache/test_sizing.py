"""Sizes of the pool: the memory that a GPU leaves for it, and the message if the memory is too little."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig, with_default_sizes
from tests.worker.kv_cache.harness import SPEC
from worker.kv_cache.pages import chunk_pages, window_pages
from worker.kv_cache.sizing import (
    GIB,
    RESERVED_BYTES,
    GpuMemory,
    PoolBudget,
    PoolSize,
    WeightsSize,
    configured_budget,
    longest_sequence,
    size_pool,
)
from worker.kv_cache.tensors import CacheGroup, bytes_per_page, bytes_per_state, one_group
from worker.ops.recurrent_state import DeltaNetShape
from worker.spec import LayerSpec, ModelSpec

H200 = GpuMemory("NVIDIA H200", free=138 * GIB, total=140 * GIB, utilization=0.9)
CPU = torch.device("cpu")
A_TOKEN = bytes_per_page(SPEC, one_group(SPEC)[0], 1, torch.bfloat16, CPU)


def sized(tokens: int, max_seq_len: int = 0, **worker: Any) -> PoolSize:
    """Returns the pool for a memory budget that holds `tokens` tokens."""
    return sized_for(SPEC, tokens, max_seq_len, **worker)


def sized_for(spec: ModelSpec, tokens: int, max_seq_len: int, **worker: Any) -> PoolSize:
    return size_pool(
        spec,
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
    H200.check_weights(WeightsSize(H200.available))
    with pytest.raises(ConfigError) as caught:
        H200.check_weights(WeightsSize(150 * GIB, int4=41 * GIB))
    message = str(caught.value)
    assert (
        "150.00 GiB" in message
        and "124.00 GiB" in message
        and "138.00 of 140.00 GiB" in message
        and "\n" not in message
    )
    assert "NVIDIA H200" in message and "--gpu-memory-utilization is 0.9" in message
    assert "serve it with --quantization int4, which needs 41.0 GiB for its weights, end other processes" in message


def test_size_pool_is_the_budget_or_what_all_sequences_need() -> None:
    exact = sized(6 * 16, max_seq_len=32, page_size=16)
    assert exact == PoolSize((6,), 16, 32, one_group(SPEC), (16 * A_TOKEN,))
    assert sized(10**6, max_seq_len=32, page_size=16, max_batch_size=4).pages == (4 * 2 + 1,)
    assert [pool.usable for pool in exact.pools()] == [5] and "5 for 3 layers" in str(exact)


def test_size_pool_shortens_a_length_that_was_not_configured() -> None:
    short = sized(3 * 16, page_size=16)
    assert (short.pages, short.max_seq_len) == ((3,), 32), "one page is scratch"
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


GEMMA = replace(SPEC, layers=(*[LayerSpec(512, 0)] * 5, LayerSpec(0, 0)) * 2, max_positions=1 << 17)


def used(spec: ModelSpec, size: PoolSize) -> int:
    return sum(pages * nbytes for pages, nbytes in zip(size.pages, size.page_bytes, strict=True))


def test_size_pool_gives_windows_less_where_memory_is_tight() -> None:
    tokens = 4 * 30_000  # tokens of three layers, which need as much memory as 30,000 tokens of twelve layers
    size = sized_for(GEMMA, tokens, 0, page_size=32)
    assert size.groups == (CacheGroup(0, (5, 11)), CacheGroup(512, tuple(i for i in range(12) if i % 6 < 5)))
    full, windows = (pages - 1 for pages in size.pages)
    assert windows == -(-full * 32 * window_pages(512, 32) // 4096) + chunk_pages(512, 32) < full
    assert full * 32 > 2 * 30_000, "more than twice as many tokens as in one group"
    assert tokens * A_TOKEN - 32 * 4 * A_TOKEN * 7 < used(GEMMA, size) <= tokens * A_TOKEN, "and no memory is left"


def test_size_pool_has_fewer_windows_where_the_longest_sequence_would_not_fit() -> None:
    tokens = 4 * 10_000
    short = sized_for(GEMMA, tokens, 0, page_size=32)
    assert short.max_seq_len == (short.pages[0] - 1) * 32 < 45_000
    long = sized_for(GEMMA, tokens, 45_000, page_size=32)
    assert long.max_seq_len == 45_000 < long.pages[0] * 32 and used(GEMMA, long) <= tokens * A_TOKEN
    assert window_pages(512, 32) + chunk_pages(512, 32) < long.pages[1] < short.pages[1]
    with pytest.raises(ConfigError, match="does not hold one sequence of 100000 tokens"):
        sized_for(GEMMA, tokens, 100_000, page_size=32)


def test_size_pool_has_windows_for_all_sequences_if_memory_is_plenty() -> None:
    size = sized_for(GEMMA, 10**9, 40_000, page_size=32, max_batch_size=3)
    assert size.pages == (3 * 1250 + 1, 3 * window_pages(512, 32) + chunk_pages(512, 32) + 1)


def test_size_pool_has_no_more_pages_for_windows_than_for_all() -> None:
    size = sized_for(GEMMA, 4 * 1024, 600, page_size=16)
    assert size.pages[0] == size.pages[1] and used(GEMMA, size) <= 4 * 1024 * A_TOKEN
    contiguous = sized_for(GEMMA, 10**5, 600, kv_cache_backend="contiguous")
    assert contiguous.groups == one_group(GEMMA), "a sequence has one page of 600 tokens"


def test_size_pool_of_windows_only_does_not_limit_the_length() -> None:
    spec = replace(SPEC, layers=(LayerSpec(512, 0),) * 3, max_positions=1 << 17)
    size = sized_for(spec, 3000, 0, page_size=32)
    assert size.max_seq_len == 1 << 17 and size.pages[0] <= 3000 // 32
    assert size.pages[0] > window_pages(512, 32) + chunk_pages(512, 32), "a sequence of any length fits"
    assert sized_for(spec, 1000, 0, page_size=32).max_seq_len == 960, "too few pages for a window and a chunk"


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
    assert configured_budget(WorkerConfig(), free=10 * GIB).nbytes == 4 * GIB, "a share of what is free on all hosts"


# Recurrent states

DELTA = DeltaNetShape(key_heads=2, value_heads=2, key_dim=16, value_dim=32, taps=4)
HYBRID = replace(SPEC, layers=(LayerSpec(0, 0, state=DELTA), LayerSpec(0, 0), LayerSpec(0, 0)))
A_STATE = bytes_per_state(HYBRID, torch.bfloat16)


def sized_hybrid(nbytes: int, **worker: Any) -> PoolSize:
    budget, config = (
        PoolBudget(nbytes, "change something"),
        WorkerConfig(**{"overlap": False, "page_size": 16, **worker}),
    )
    sizes = with_default_sizes(config, on_gpu=False)
    return size_pool(HYBRID, torch.bfloat16, CPU, budget, ModelConfig(max_seq_len=64), sizes, torch.bfloat16)


def test_states_get_what_sequences_and_checkpoints_need() -> None:
    size = sized_hybrid(GIB, max_batch_size=4, state_checkpoint_tokens=32)
    assert size.pages == (1 + 4 * 4,) and size.state_slots == 1 + 2 * 4 + 4 * 64 // 32
    assert size.state_bytes == A_STATE and size.nbytes == 17 * size.page_bytes[0] + 17 * A_STATE
    slots = size.slots()
    assert slots is not None and slots.usable == 16 and "16 recurrent states" in str(size)
    assert sized_hybrid(GIB, max_batch_size=4, overlap=True).state_slots == 1 + 3 * 4 + 1
    assert sized_hybrid(GIB, max_batch_size=4, prefix_cache=False, state_checkpoint_tokens=16).state_slots == 1 + 9


def test_states_get_half_of_the_budget_at_most() -> None:
    budget = 40 * A_STATE
    size = sized_hybrid(budget, max_batch_size=64)
    assert size.state_slots == 20 and size.nbytes <= budget < size.nbytes + size.page_bytes[0]


def test_states_of_one_sequence_always_have_room_or_the_error_says_why() -> None:
    pages = 5 * sized_hybrid(GIB).page_bytes[0]
    assert sized_hybrid(pages + 4 * A_STATE).state_slots == 4
    with pytest.raises(ConfigError, match="does not hold one sequence of 64 tokens"):
        sized_hybrid(pages + 4 * A_STATE - 1)


def test_models_without_recurrent_layers_have_no_slots() -> None:
    assert sized(6 * 16, max_seq_len=32, page_size=16).slots() is None
