"""The K/V tensors: layout, size, and memory that is taken only where it is written."""

import resource
from pathlib import Path

import pytest
import torch

from tests.worker.kv_cache.harness import SPEC
from worker.kv_cache.tensors import KVCache, bytes_per_page


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
def test_cache_has_layout_and_size(dtype: torch.dtype) -> None:
    cache = KVCache(SPEC, pages=5, page_size=16, dtype=dtype, device="cpu")
    row = 16 if dtype.itemsize > 1 else 20  # with the scale
    assert cache.k.shape == cache.v.shape == (3, 5, 16, 2, row) and cache.k.dtype == cache.v.dtype == dtype
    assert cache.k.nbytes + cache.v.nbytes == 5 * bytes_per_page(SPEC, 16, dtype, "cpu")
    assert not cache.k.view(torch.uint8).any() and not cache.v.view(torch.uint8).any()


def test_cache_layer_is_a_view() -> None:
    cache = KVCache(SPEC, pages=2, page_size=4, dtype=torch.float32, device="cpu")
    k, v = cache.layer(1)
    k[1, 3] = 7.0
    v[0] = 9.0
    assert (cache.k[1, 1, 3] == 7.0).all() and cache.k.count_nonzero() == k[1, 3].numel()
    assert (cache.v[1, 0] == 9.0).all() and cache.v.count_nonzero() == v[0].numel()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_cache_pages_never_written_take_no_memory() -> None:
    before = resident_bytes()
    cache = KVCache(SPEC, pages=1 << 15, page_size=16, dtype=torch.float32, device="cpu")
    cache.k[:, 7] = 1.0
    assert resident_bytes() - before < 64 << 20 < cache.k.nbytes


def test_bytes_per_page_counts_k_and_v_of_all_layers() -> None:
    assert bytes_per_page(SPEC, 16, torch.bfloat16, "cpu") == 2 * 3 * 16 * 2 * 16 * 2
    assert bytes_per_page(SPEC, 16, torch.int8, "cpu") == 2 * 3 * 16 * 2 * (16 + 4)
    assert bytes_per_page(SPEC, 16, torch.float8_e4m3fn, "cuda") == 2 * 3 * 16 * 2 * 16
