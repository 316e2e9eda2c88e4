import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.worker.kernels.cases import TRITON_DTYPES, Batch, batch, close
from worker.kernels import attention as twin
from worker.kernels.attention import attention_torch

MIXED = [(1, 1), (1, 37), (5, 5), (1, 64), (17, 40), (3, 99), (1, 2), (33, 33)]


def one_by_one(case: Batch, scale: float, window: int) -> Tensor:
    """The reference: each sequence alone, fp32, its keys and values in plain order."""
    out = []
    for i, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        q = case.q[case.starts[i] : case.starts[i + 1]].float().transpose(0, 1)
        group = q.shape[0] // keys.shape[1]
        k, v = (x.float().transpose(0, 1).repeat_interleave(group, 0) for x in (keys, values))
        at = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
        where = torch.arange(k.shape[1])[None, :]
        mask = (where <= at) & (where > at - window) if window else where <= at
        out.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1))
    return torch.cat(out).to(case.q.dtype)


def run_torch(case: Batch, scale: float, window: int) -> Tensor:
    fields = case.starts, case.kv_lens, case.pages
    return attention_torch(case.q, case.cache_k, case.cache_v, *fields, scale=scale, window=window)


def run_triton(case: Batch, scale: float, window: int, device: str) -> Tensor:
    from worker.kernels.attention_triton import attention_triton

    there = case.to(device)
    fields = there.starts, there.kv_lens, there.pages, there.tiles, there.max_kv
    return attention_triton(there.q, there.cache_k, there.cache_v, *fields, scale=scale, window=window).cpu()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("window", [0, 1, 24])
def test_twin_agrees_with_each_sequence_alone(page_size: int, size: int, window: int) -> None:
    case = batch(MIXED, 6, 2, size, page_size)
    close(run_torch(case, size**-0.5, window), one_by_one(case, size**-0.5, window))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 1), (6, 3)])
@pytest.mark.parametrize("lengths", [[(1, 1)], [(1, 9), (1, 5)], [(7, 30)]])
def test_twin_groups_of_heads_and_small_batches(heads: int, kv_heads: int, lengths: list[tuple[int, int]]) -> None:
    case = batch(lengths, heads, kv_heads, 64, 16)
    close(run_torch(case, 0.2, 0), one_by_one(case, 0.2, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_twin_in_half_precision(dtype: torch.dtype) -> None:
    case = batch(MIXED, 4, 2, 64, 16, dtype)
    close(run_torch(case, 0.125, 0), one_by_one(case, 0.125, 0))


def test_twin_within_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into many groups of sequences and slabs of rows, the result is the same."""
    case = batch(MIXED, 4, 2, 64, 16)
    expected = one_by_one(case, 0.125, 24)
    monkeypatch.setattr(twin, "GATHER_ELEMENTS", 1)
    monkeypatch.setattr(twin, "MASK_ELEMENTS", 700)
    close(run_torch(case, 0.125, 24), expected)


def test_public_function_takes_a_strided_query() -> None:
    case = batch(MIXED, 4, 2, 64, 16)
    fused = torch.cat((case.q, torch.full_like(case.q, torch.nan)), dim=1)
    got = twin.attention(fused[:, :4], case.cache_k, case.cache_v, *case.fields, scale=0.125, window=0)
    assert got.is_contiguous()
    close(got, one_by_one(case, 0.125, 0))


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page_size", "window"),
    [(2, 1, 64, 16, 0), (3, 1, 96, 1, 24), (4, 4, 64, 64, 1), (8, 1, 32, 16, 0), (4, 2, 256, 16, 40)],
)
def test_triton_agrees_with_the_twin(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, page_size: int, window: int, device: str
) -> None:
    case = batch([(1, 37), (17, 90), (1, 1), (3, 70)], heads, kv_heads, size, page_size, dtype)
    close(run_triton(case, size**-0.5, window, device), one_by_one(case, size**-0.5, window))


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("dtype", TRITON_DTYPES)
def test_triton_joins_splits(dtype: torch.dtype, window: int, device: str) -> None:
    case = batch([(1, 1100), (1, 20), (4, 1030)], 2, 1, 32, 64, dtype)
    close(run_triton(case, 0.2, window, device), one_by_one(case, 0.2, window))


@pytest.mark.parametrize("window", [0, 600])
@pytest.mark.parametrize("dtype", TRITON_DTYPES)
def test_triton_bits_do_not_depend_on_chunking_or_company(dtype: torch.dtype, window: int, device: str) -> None:
    """The last row of a chunk = the same row decoded alone = decoded beside others of any length."""
    chunk = batch([(20, 1100)], 2, 1, 32, 16, dtype)
    as_chunk = run_triton(chunk, 0.2, window, device)
    for length in (1100, 1095):
        alone = first_rows(chunk, [(chunk.q[length - 1100 - 1 :][:1], length)])
        company = batch([(1, 3000), (20, 1100)], 2, 1, 32, 16, dtype)
        beside = first_rows(company, [(company.q[:1], 7), (chunk.q[length - 1100 - 1 :][:1], length)], chunk)
        row = as_chunk[length - 1100 - 1]
        assert torch.equal(run_triton(alone, 0.2, window, device)[0], row)
        assert torch.equal(run_triton(beside, 0.2, window, device)[-1], row)


def first_rows(case: Batch, rows: list[tuple[Tensor, int]], other: Batch | None = None) -> Batch:
    """Decodes over the caches of `case` (the last one over `other`'s single sequence, appended to the pool)."""
    cache_k, cache_v, pages = case.cache_k, case.cache_v, case.pages[: len(rows)]
    if other is not None:
        cache_k, cache_v = torch.cat((cache_k, other.cache_k)), torch.cat((cache_v, other.cache_v))
        width = min(pages.shape[1], other.pages.shape[1])
        pages = torch.cat((pages[:-1, :width], other.pages[:, :width] + case.cache_k.shape[0])).contiguous()
    count = len(rows)
    return Batch(
        torch.cat([q for q, _ in rows]), cache_k, cache_v, torch.arange(count + 1, dtype=torch.int32),
        torch.tensor([kv for _, kv in rows], dtype=torch.int32), pages,
        torch.tensor([(i, 0) for i in range(count)], dtype=torch.int32), (), (), 1, max(kv for _, kv in rows),
    )  # fmt: skip
