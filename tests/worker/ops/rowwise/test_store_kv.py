from collections.abc import Callable

import pytest
import torch

from tests.worker.ops.harness.cases import TRITON_DTYPES, random
from worker.ops.rope import store_kv
from worker.ops.rope.reference import store_kv_torch

PAGES, PAGE_SIZE, HEADS, SIZE = 5, 4, 2, 24


def check(write: Callable[..., None], dtype: torch.dtype, device: str) -> None:
    """Asserts that only the named slots change, and that each slot gets its token's row."""
    fused = random(3, 3 * HEADS, SIZE, dtype=dtype, device=device)
    k, v = fused[:, HEADS : 2 * HEADS], fused[:, 2 * HEADS :]
    cache_k, cache_v = (random(PAGES, PAGE_SIZE, HEADS, SIZE, dtype=dtype, device=device, seed=i) for i in (1, 2))
    expected_k, expected_v = cache_k.clone(), cache_v.clone()
    slots = [17, 4, 11]
    for token, slot in enumerate(slots):
        expected_k[slot // PAGE_SIZE, slot % PAGE_SIZE] = k[token]
        expected_v[slot // PAGE_SIZE, slot % PAGE_SIZE] = v[token]
    write(k, v, cache_k, cache_v, torch.tensor(slots, device=device))
    assert torch.equal(cache_k, expected_k) and torch.equal(cache_v, expected_v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("write", [store_kv, store_kv_torch])
def test_write(write: Callable[..., None], dtype: torch.dtype) -> None:
    check(write, dtype, "cpu")


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
def test_store_kv_triton_agrees_with_torch(dtype: torch.dtype, device: str) -> None:
    from worker.ops.rope.triton import store_kv_triton

    check(store_kv_triton, dtype, device)


def check_clamped(write: Callable[..., None], device: str) -> None:
    """Asserts that values too large for float8_e4m3fn become its largest value, and that exact values are unchanged."""
    k = random(3, HEADS, SIZE, device=device).to(torch.float8_e4m3fn).half()
    k[0, 0, :4] = torch.tensor([1000.0, -1000.0, 448.0, -65504.0])
    cache_k, cache_v = (torch.zeros(PAGES, PAGE_SIZE, HEADS, SIZE, device=device).to(torch.float8_e4m3fn) for _ in "kv")
    write(k, -k, cache_k, cache_v, torch.tensor([17, 4, 11], device=device))
    for new, cache in ((k, cache_k), (-k, cache_v)):
        rows = cache.float().flatten(0, 1)
        assert torch.equal(rows[[17, 4, 11]], new.float().clamp(-448, 448))
        assert rows.count_nonzero() == new.count_nonzero()


@pytest.mark.parametrize("write", [store_kv, store_kv_torch])
def test_write_to_a_float8_cache(write: Callable[..., None]) -> None:
    check_clamped(write, "cpu")


def test_triton_writes_to_a_float8_cache(device: str) -> None:
    from worker.ops.rope.triton import store_kv_triton

    check_clamped(store_kv_triton, device)
