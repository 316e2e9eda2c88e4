"""Attention of rows that attend to keys after their own position: to all keys of a span, as tokens of an image do."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pairs import in_pairs
from tests.worker.ops.harness.cases import Batch, batch, close
from tests.worker.ops.harness.cpu_tiers import FUNCTIONS, as_written, needs_library, tier  # noqa: F401
from worker.ops.attention import native as attention_native
from worker.ops.attention.reference import attention_torch
from worker.ops.launch_options import GpuOptions

LENGTHS = [(1, 37), (150, 200), (90, 90), (1, 1), (33, 1500)]
SPANS = [[], [(60, 130), (140, 199)], [(0, 90)], [], [(1470, 1490)]]  # spans of each sequence: (first position, end)


def visible(lengths: list[tuple[int, int]] = LENGTHS, spans: list[list[tuple[int, int]]] = SPANS) -> Tensor:
    """Returns for each row the position after its last visible key: the end of its span, or after the row itself."""
    ends: list[int] = []
    for (rows, length), of_sequence in zip(lengths, spans, strict=True):
        for position in range(length - rows, length):
            ends.append(next((end for begin, end in of_sequence if begin <= position < end), position + 1))
    return torch.tensor(ends, dtype=torch.int32)


def one_by_one(case: Batch, ends: Tensor, window: int) -> Tensor:
    """The reference: each row alone in float32, with the keys that are visible to it."""
    out, scale = [], case.q.shape[2] ** -0.5
    group = case.q.shape[1] // case.cache_k.shape[2]
    for index, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        begin, end = case.query_start_loc[index : index + 2].tolist()
        for row in range(begin, end):
            position = int(case.seq_lens[index]) - (end - row)
            first = max(0, position - window + 1) if window else 0
            seen = slice(first, int(ends[row]))
            k, v = (each[seen].float().repeat_interleave(group, 1) for each in (keys, values))
            weights = (torch.einsum("hd,lhd->hl", case.q[row].float(), k) * scale).softmax(-1)
            out.append(torch.einsum("hl,lhd->hd", weights, v))
    return torch.stack(out).to(case.q.dtype)


def run(form: Any, case: Batch, window: int, ends: Tensor | None) -> Tensor:
    caches = [case.cache_k, case.cache_v]
    if form is attention_native.attention:
        caches = as_written(*caches)
    out: Tensor = form(
        case.q,
        *caches,
        *case.fields,
        scale=case.q.shape[2] ** -0.5,
        window=window,
        bidirectional_end=ends,
    )
    return out


@pytest.mark.parametrize("window", [0, 25, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_pytorch_shows_rows_what_they_may_see(window: int, dtype: torch.dtype) -> None:
    case, ends = batch(LENGTHS, 6, 2, 64, 16, dtype), visible()
    close(run(attention_torch, case, window, ends), one_by_one(case, ends, window))


@needs_library
@pytest.mark.usefixtures("tier")
@in_pairs(
    FUNCTIONS | {"window": [0, 25, 700], "heads, kv_heads, size": [(6, 2, 64), (4, 1, 24), (8, 8, 96)]},
    indirect=["tier"],
)
def test_library_shows_rows_what_they_may_see(
    window: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype
) -> None:
    case, ends = batch(LENGTHS, heads, kv_heads, size, 32, dtype), visible()
    found = run(attention_native.attention, case, window, ends)
    close(found, one_by_one(case, ends, window))
    causal = torch.tensor([end for end in visible(spans=[[]] * len(LENGTHS))], dtype=torch.int32)
    assert torch.equal(
        run(attention_native.attention, case, window, causal), run(attention_native.attention, case, window, None)
    )


@needs_library
@pytest.mark.usefixtures("tier", "threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_a_row_depend_neither_on_company_nor_on_chunks_nor_on_threads(dtype: torch.dtype) -> None:
    whole, spans = batch([(1300, 1300)], 6, 2, 64, 32, dtype), [[(30, 290), (1100, 1270)]]
    ends = visible([(1300, 1300)], spans)
    expected = run(attention_native.attention, whole, 40, ends)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for begin, end in ((0, 30), (30, 290), (290, 295), (295, 1300), (1100, 1270), (1270, 1300), (40, 290)):
            case = batch([(1, 50), (end - begin, end)], 6, 2, 64, 32, dtype)
            cut = Batch(
                torch.cat([case.q[:1], whole.q[begin:end]]), case.cache_k, case.cache_v, case.query_start_loc,
                case.seq_lens, case.page_table, case.keys, case.values, case.max_kv_len,
            )  # fmt: skip
            for cache, keys in ((cut.cache_k, whole.keys[0]), (cut.cache_v, whole.values[0])):
                slots = cut.page_table[1].long()[:, None] * 32 + torch.arange(32)
                cache.flatten(0, 1)[slots.flatten()[:end]] = keys[:end]
            of_all = torch.cat([torch.tensor([50], dtype=torch.int32), ends[begin:end]])
            found = run(attention_native.attention, cut, 40, of_all)
            assert torch.equal(found[1:], expected[begin:end]), (threads, begin, end)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("window", [0, 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_triton_shows_rows_what_they_may_see(window: int, dtype: torch.dtype, overlap: bool, device: str) -> None:
    from worker.ops.attention.triton import attention_triton

    lengths, spans = [(1, 37), (60, 80), (40, 40)], [[], [(25, 70)], [(0, 40)]]
    case, ends = batch(lengths, 4, 2, 64, 16, dtype), visible(lengths, spans)
    form = partial(attention_triton, options=GpuOptions(softmax_overlap=overlap))
    found = run(form, case.to(device), window, ends.to(device)).cpu()
    close(found, one_by_one(case, ends, window))


@pytest.mark.parametrize("size", [64, 256])
def test_triton_gives_causal_rows_what_they_have_without(size: int, device: str) -> None:
    from worker.ops.attention.triton import attention_triton

    lengths = [(1, 37), (20, 80)]
    case, ends = batch(lengths, 4, 2, size, 16), visible(lengths, [[], []])
    both = [run(attention_triton, case.to(device), 0, each) for each in (ends.to(device), None)]
    close(both[0].cpu(), both[1].cpu())
