"""The K/V tensors: layout, size, and that memory is used only where K/V is written."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.worker.kv_cache.harness import SPEC
from worker.kv_cache.tensors import CacheGroup, KVCache, bytes_per_page, bytes_per_state, one_group
from worker.ops.paged_kv import FOUR_BITS, row_dtypes
from worker.ops.recurrent_state import DeltaNetShape
from worker.spec import LayerSpec

[ALL] = one_group(SPEC)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, FOUR_BITS]
)
def test_cache_has_layout_and_size(dtype: torch.dtype) -> None:
    cache = KVCache(SPEC, pages=(5,), page_size=16, dtype=dtype, device="cpu")
    # elements of a key and of a value; of rows of codes, 4 bytes are the scale
    rows = {torch.int8: (20, 20), torch.float8_e4m3fn: (20, 20), FOUR_BITS: (20, 13)}.get(dtype, (16, 16))
    for [part], row, own in zip((cache.k, cache.v), rows, row_dtypes(dtype), strict=True):
        assert part.shape == (3, 5, 16, 2, row) and part.dtype == own
    assert cache.k[0].nbytes + cache.v[0].nbytes == 5 * bytes_per_page(SPEC, ALL, 16, dtype, "cpu")
    assert not cache.k[0].view(torch.uint8).any() and not cache.v[0].view(torch.uint8).any()


def test_cache_layer_is_a_view() -> None:
    cache = KVCache(SPEC, pages=(2,), page_size=4, dtype=torch.float32, device="cpu")
    k, v = cache.layer(1)
    k[1, 3] = 7.0
    v[0] = 9.0
    assert (cache.k[0][1, 1, 3] == 7.0).all() and cache.k[0].count_nonzero() == k[1, 3].numel()
    assert (cache.v[0][1, 0] == 9.0).all() and cache.v[0].count_nonzero() == v[0].numel()


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_cache_pages_never_written_take_no_memory() -> None:
    before = rss_bytes()
    cache = KVCache(SPEC, pages=(1 << 15,), page_size=16, dtype=torch.float32, device="cpu")
    cache.k[0][:, 7] = 1.0
    assert rss_bytes() - before < 64 << 20 < cache.k[0].nbytes


def test_bytes_per_page_counts_k_and_v_of_all_layers() -> None:
    assert bytes_per_page(SPEC, ALL, 16, torch.bfloat16, "cpu") == 2 * 3 * 16 * 2 * 16 * 2
    assert bytes_per_page(SPEC, ALL, 16, torch.int8, "cpu") == 2 * 3 * 16 * 2 * (16 + 4)
    assert bytes_per_page(SPEC, ALL, 16, FOUR_BITS, "cpu") == 3 * 16 * 2 * ((16 + 4) + (8 + 1 + 4))
    assert bytes_per_page(SPEC, ALL, 16, torch.float8_e4m3fn, "cuda") == 2 * 3 * 16 * 2 * 16
    assert bytes_per_page(SPEC, CacheGroup(8, (0, 2)), 16, torch.bfloat16, "cpu") == 2 * 2 * 16 * 2 * 16 * 2


def test_cache_layers_of_a_group_have_its_pages_and_tensors() -> None:
    groups = (CacheGroup(0, (1,)), CacheGroup(8, (0, 2)))
    cache = KVCache(SPEC, (5, 3), 16, torch.float32, "cpu", groups)
    assert cache.group_of == {0: 1, 1: 0, 2: 1} and [len(cache.layer(index)[0]) for index in range(3)] == [3, 5, 3]
    for index in range(3):
        for part in cache.layer(index):
            part.fill_(index + 1)
    assert cache.k[0].unique().tolist() == cache.v[0].unique().tolist() == [2.0]
    assert [cache.k[1][at].unique().tolist() for at in range(2)] == [[1.0], [3.0]]


def test_recurrent_layers_have_states_and_no_pages() -> None:
    shape = DeltaNetShape(key_heads=2, value_heads=4, key_dim=16, value_dim=24, taps=4)
    layers = (LayerSpec(0, 0, state=shape), LayerSpec(0, 0), LayerSpec(0, 0, state=shape))
    hybrid = replace(SPEC, layers=layers)
    cache = KVCache(
        hybrid, (5,), 16, torch.int8, "cpu", state_slots=7,
        state_dtype=torch.bfloat16,
    )  # fmt: skip
    assert cache.group_of == {1: 0} and len(cache.k[0]) == 1 and sorted(cache.states) == [0, 2]
    first = cache.states[0]
    assert first.tail.shape == (7, 3, 160) and first.tail.dtype == torch.bfloat16
    assert len(first.memory) == 7 and first.memory.dtype == torch.float32
    held = sum(part.nbytes for state in cache.states.values() for part in (state.tail, state.memory))
    assert held == 7 * bytes_per_state(hybrid, torch.bfloat16) > 7 * 2 * 4 * 16 * 24
    assert bytes_per_state(SPEC, torch.bfloat16) == 0 and not KVCache(SPEC, (5,), 16, torch.int8, "cpu").states
