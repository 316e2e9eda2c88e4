"""Attention of the C library against the gathering twin, and its promise: a row's bits are its own."""

from dataclasses import dataclass

import pytest
import torch
from native_tiers import close, dtypes, needs_library, tier  # noqa: F401
from torch import Tensor

from worker.kernels import native
from worker.kernels.attention import attention_torch

pytestmark = needs_library


@dataclass(frozen=True)
class Batch:
    """Sequences with their whole K/V, from which any cut into pages and steps can be made."""

    q: list[Tensor]  # [kv_len, Hq, D] each
    k: list[Tensor]
    v: list[Tensor]

    def run(self, rows: list[tuple[int, int, int]], page: int, window: int = 0, plain: bool = False) -> list[Tensor]:
        """Attention of (sequence, from, to) chunks of one step; everything not written is NaN."""
        heads, d = self.k[0].shape[1:]
        counts = [-(-to // page) for _, _, to in rows]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(7)) + 1
        cache_k, cache_v = (torch.full((sum(counts) + 1, page, heads, d), float("nan"), dtype=self.k[0].dtype) for _ in "kv")
        table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
        for i, (own, (s, _, to)) in enumerate(zip(order.split(counts), rows, strict=True)):
            table[i, : len(own)] = own
            for cache, full in ((cache_k, self.k), (cache_v, self.v)):
                padded = torch.full((len(own) * page, heads, d), float("nan"), dtype=cache.dtype)
                padded[:to] = full[s][:to]
                cache[own] = padded.view(len(own), page, heads, d)
        starts = torch.tensor([0] + [to - begin for _, begin, to in rows]).cumsum(0).int()
        kv_lens = torch.tensor([to for _, _, to in rows], dtype=torch.int32)
        q = torch.cat([self.q[s][begin:to] for s, begin, to in rows])
        wide = torch.cat([q, q], 1)[:, : q.shape[1]]  # rows strided, as a view of qkv
        attend = attention_torch if plain else native.attention
        out = attend(wide, cache_k, cache_v, starts, kv_lens, table, scale=d**-0.5, window=window)
        return list(out.split(starts.diff().tolist()))


def batch(lengths: list[int], heads: int, kv_heads: int, d: int, dtype: torch.dtype, seed: int = 0) -> Batch:
    make = torch.Generator().manual_seed(seed)

    def tensors(count: int) -> list[Tensor]:
        return [torch.randn(n, count, d, generator=make).to(dtype) for n in lengths]

    return Batch(tensors(heads), tensors(kv_heads), tensors(kv_heads))


@dtypes
@pytest.mark.parametrize("heads, kv_heads, d", [(4, 2, 16), (6, 1, 24), (8, 8, 64), (4, 4, 96), (16, 8, 128), (4, 1, 256), (3, 1, 7)])
@pytest.mark.parametrize("window", [0, 5, 100])
def test_equals_the_plain_twin(tier: int, dtype: torch.dtype, heads: int, kv_heads: int, d: int, window: int) -> None:
    some = batch([150, 1, 64, 65, 200], heads, kv_heads, d, dtype)
    rows = [(0, 0, 150), (1, 0, 1), (2, 63, 64), (3, 30, 65), (4, 199, 200)]
    for ours, plain in zip(some.run(rows, 16, window), some.run(rows, 16, window, plain=True), strict=True):
        close(ours, plain)


@dtypes
def test_spans_merge(tier: int, dtype: torch.dtype) -> None:
    some = batch([2300], 4, 2, 32, dtype)
    for window in (0, 1500):
        for rows in ([(0, 2299, 2300)], [(0, 2000, 2300)]):
            close(some.run(rows, 64, window)[0], some.run(rows, 64, window, plain=True)[0])


@dtypes
@pytest.mark.parametrize("window", [0, 70])
def test_bits_do_not_depend_on_chunks_pages_threads_or_company(tier: int, dtype: torch.dtype, window: int) -> None:
    some = batch([1200, 333, 70, 1], 8, 4, 64, dtype)
    whole = some.run([(0, 0, 1200)], 16, window)[0]
    threads = torch.get_num_threads()
    try:
        for page in (1, 16, 64, 2048):
            for count in (1, 2):
                torch.set_num_threads(count)
                rows = [(1, 332, 333), (0, 900, 1150), (2, 3, 70), (3, 0, 1)]
                assert torch.equal(some.run(rows, page, window)[1], whole[900:1150])
                assert torch.equal(some.run([(0, 1199, 1200)], page, window)[0], whole[1199:])
                crowd = [(s, to - 1, to) for s, to in [(1, 300), (2, 64), (3, 1), (0, 1100), (1, 20), (2, 7)] * 2]
                assert torch.equal(some.run(crowd, page, window)[3], whole[1099:1100])
    finally:
        torch.set_num_threads(threads)
