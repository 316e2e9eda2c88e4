import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.worker.ops.harness.cases import TRITON_DTYPES, Batch, batch, close, poisoned
from tests.worker.ops.harness.cpu_tiers import as_written
from worker.ops import attention
from worker.ops.attention import reference as twin
from worker.ops.attention.reference import attention_torch
from worker.ops.launch_options import NO_OPTIONS, GpuOptions
from worker.ops.linear.triton_tiles import DeviceKind

MIXED = [(1, 1), (1, 37), (5, 5), (1, 64), (17, 40), (3, 99), (1, 2), (33, 33)]
FEW = [(1, 37), (17, 90), (1, 1), (3, 70)]
FP8 = torch.float8_e4m3fn


def one_by_one(case: Batch, scale: float, window: int, sinks: Tensor | None = None, softcap: float = 0.0) -> Tensor:
    """The reference: each sequence alone in fp32, with its keys and values in plain order."""
    out = []
    column = torch.full((case.q.shape[1],), -torch.inf) if sinks is None else sinks
    for i, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        q = case.q[case.query_start_loc[i] : case.query_start_loc[i + 1]].float().transpose(0, 1)
        group = q.shape[0] // keys.shape[1]
        k, v = (x.float().transpose(0, 1).repeat_interleave(group, 0) for x in (keys, values))
        at = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
        where = torch.arange(k.shape[1])[None, :]
        mask = (where <= at) & (where > at - window) if window else where <= at
        scores = q @ k.mT * scale
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        scores = torch.cat((scores.masked_fill(~mask, -torch.inf), column[:, None, None].expand(-1, q.shape[1], 1)), 2)
        out.append((scores.softmax(dim=2)[..., :-1] @ v).transpose(0, 1))
    return torch.cat(out).to(case.q.dtype)


def near(got: Tensor, expected: Tensor) -> None:
    """Asserts that the norm of the error, relative to the norm of the result, is within the rounding of the dtype."""
    away = (got.float() - expected.float()).norm() / expected.float().norm()
    assert away < (1e-2 if got.dtype == torch.bfloat16 else 1e-3), away  # false for NaN


def in_fp8(case: Batch) -> Batch:
    """Returns the same case with keys and values rounded to eight bits."""
    keys, values = (tuple(x.to(FP8).to(x.dtype) for x in parts) for parts in (case.keys, case.values))
    return dataclasses.replace(
        case, cache_k=case.cache_k.to(FP8), cache_v=case.cache_v.to(FP8), keys=keys, values=values
    )


def run_torch(case: Batch, scale: float, window: int, **more: Any) -> Tensor:
    return attention_torch(case.q, case.cache_k, case.cache_v, *case.fields, scale=scale, window=window, **more)


def run_triton(
    case: Batch,
    scale: float,
    window: int,
    device: str,
    longer: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    options: GpuOptions = NO_OPTIONS,
) -> Tensor:
    """Runs the kernel with new memory full of NaN. longer: by how much the bound on the lengths is too large"""
    from worker.ops.attention.triton import attention_triton

    there = case.to(device)
    fields = there.query_start_loc, there.seq_lens, there.page_table, there.max_kv_len + longer
    more: dict[str, Any] = {"sinks": None if sinks is None else sinks.to(device), "softcap": softcap}
    with poisoned():
        out = attention_triton(
            there.q, there.cache_k, there.cache_v, *fields, scale=scale, window=window, options=options, **more
        )
    return out.cpu()


def sinks_of(heads: int) -> Tensor:
    """Returns sinks that bf16 holds exactly. The last one is larger than all scores."""
    sinks = torch.linspace(-4, 2, heads).bfloat16().float()
    sinks[-1] = 9.0
    return sinks


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves no memory for partial results, so only sequences of one row are split: merging is slow here."""
    from worker.ops.attention import triton as attention

    monkeypatch.setattr(attention, "PARTIAL_BYTES", 0)
    monkeypatch.setattr(attention, "SPLITS_AT_ONCE", 2)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes splits of 128, 512 and 2,048 positions, so that a short sequence has all three kinds."""
    from worker.ops.attention import triton as attention

    monkeypatch.setattr(attention, "SPLIT_SIZE", 128)
    monkeypatch.setattr(attention, "SHORT_SPLITS", 4)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("window", [0, 1, 24])
def test_twin_agrees_with_each_sequence_alone(page_size: int, size: int, window: int) -> None:
    case = batch(MIXED, 6, 2, size, page_size)
    close(run_torch(case, size**-0.5, window), one_by_one(case, size**-0.5, window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sunk", [False, True])
def test_twin_with_sinks_and_softcap(dtype: torch.dtype, window: int, softcap: float, sunk: bool) -> None:
    case = batch(MIXED, 6, 2, 64, 16, dtype)
    more: dict[str, Any] = {"sinks": sinks_of(6) if sunk else None, "softcap": softcap}
    expected = one_by_one(case, 0.3, window, **more)
    close(run_torch(case, 0.3, window, **more), expected)
    if sunk or softcap:
        off = expected.float() - one_by_one(case, 0.3, window).float()
        assert off.norm() > 0.1 * expected.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [None, FP8])
def test_public_function_passes_sinks_and_softcap(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    """The function calls the C kernels, or plain PyTorch for a cache in a format that the C kernels cannot read."""
    case = batch(MIXED, 4, 2, 64, 16, dtype)
    case = in_fp8(case) if cache_dtype else case
    written = [case.cache_k, case.cache_v] if cache_dtype else as_written(case.cache_k, case.cache_v)
    more: dict[str, Any] = {"sinks": sinks_of(4), "softcap": 1.5}
    got = attention.attention(case.q, *written, *case.fields, scale=0.3, window=24, **more)
    close(got, one_by_one(case, 0.3, 24, **more))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 1), (6, 3)])
@pytest.mark.parametrize("lengths", [[(1, 1)], [(1, 9), (1, 5)], [(7, 30)]])
def test_twin_groups_of_heads_and_small_batches(heads: int, kv_heads: int, lengths: list[tuple[int, int]]) -> None:
    case = batch(lengths, heads, kv_heads, 64, 16)
    close(run_torch(case, 0.2, 0), one_by_one(case, 0.2, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_twin_in_half_precision(dtype: torch.dtype) -> None:
    case = batch(MIXED, 4, 2, 64, 16, dtype)
    close(run_torch(case, 0.125, 0), one_by_one(case, 0.125, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_torch_reads_an_fp8_cache_in_the_query_dtype(dtype: torch.dtype) -> None:
    """Calls the public function, which uses PyTorch here, because the C kernels cannot read such a cache."""
    case = in_fp8(batch(MIXED, 4, 2, 64, 16, dtype))
    got = attention.attention(case.q, case.cache_k, case.cache_v, *case.fields, scale=0.125, window=24)
    close(got, one_by_one(case, 0.125, 24))


def test_twin_within_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the same if the work is cut into many groups of sequences and slabs of rows."""
    case = batch(MIXED, 4, 2, 64, 16)
    expected = one_by_one(case, 0.125, 24)
    monkeypatch.setattr(twin, "GATHER_ELEMENTS", 1)
    monkeypatch.setattr(twin, "MASK_ELEMENTS", 700)
    close(run_torch(case, 0.125, 24), expected)
    more: dict[str, Any] = {"sinks": sinks_of(4), "softcap": 1.5}
    close(run_torch(case, 0.125, 24, **more), one_by_one(case, 0.125, 24, **more))


def test_public_function_takes_a_strided_query() -> None:
    case = batch(MIXED, 4, 2, 64, 16)
    fused = torch.cat((case.q, torch.full_like(case.q, torch.nan)), dim=1)
    got = attention.attention(fused[:, :4], case.cache_k, case.cache_v, *case.fields, scale=0.125, window=0)
    assert got.is_contiguous()
    close(got, one_by_one(case, 0.125, 0))


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page_size", "window"),
    [
        (2, 1, 64, 16, 0), (3, 1, 96, 1, 24), (4, 4, 64, 64, 1), (8, 1, 32, 16, 0), (4, 2, 256, 32, 40),
        (4, 1, 512, 16, 24),
        (6, 2, 128, 256, 0), (5, 1, 80, 45, 50),
    ],
)  # fmt: skip
def test_triton_agrees_with_each_sequence_alone(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, page_size: int, window: int, device: str
) -> None:
    case = batch(FEW, heads, kv_heads, size, page_size, dtype)
    near(run_triton(case, size**-0.5, window, device), one_by_one(case, size**-0.5, window))


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
def test_triton_reads_a_cache_of_eight_bits(dtype: torch.dtype, device: str) -> None:
    case = in_fp8(batch(FEW, 4, 2, 64, 16, dtype))
    near(run_triton(case, 0.125, 30, device), one_by_one(case, 0.125, 30))


def test_triton_takes_a_strided_query(device: str) -> None:
    case = batch(FEW, 2, 1, 64, 16)
    fused = torch.cat((case.q, torch.full_like(case.q, torch.nan)), dim=1)
    near(run_triton(dataclasses.replace(case, q=fused[:, :2]), 0.2, 0, device), one_by_one(case, 0.2, 0))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("dtype", TRITON_DTYPES)
def test_triton_joins_splits(
    dtype: torch.dtype, window: int, sunk: bool, softcap: float, device: str, short_splits: None
) -> None:
    """A sink must count once for a row, however many splits the row has."""
    case = batch([(1, 2600), (1, 20), (4, 1030)], 2, 1, 32, 64, dtype)
    more: dict[str, Any] = {"sinks": sinks_of(2) if sunk else None, "softcap": softcap}
    near(run_triton(case, 0.2, window, device, **more), one_by_one(case, 0.2, window, **more))


@pytest.mark.parametrize("length", [127, 128, 129, 144, 300])
def test_triton_with_sinks_at_the_ends_of_a_window(length: int, device: str) -> None:
    """The sizes are gpt-oss's. The first key of a window is the first or last key of its page, or in between."""
    case = batch([(1, length), (9, length), (length - 7, length)], 8, 1, 64, 16, torch.float16)
    near(run_triton(case, 0.125, 128, device, sinks=sinks_of(8)), one_by_one(case, 0.125, 128, sinks_of(8)))


@pytest.mark.filterwarnings("ignore:overflow encountered in")
def test_triton_with_extreme_sinks(device: str) -> None:
    case = batch(FEW, 4, 2, 64, 16)
    without = run_triton(case, 0.2, 0, device)
    got = run_triton(case, 0.2, 0, device, sinks=torch.tensor([-torch.inf, -1e38, 50.0, 3e38]))
    assert torch.equal(got[:, :2], without[:, :2]), "a sink without weight changes no bit"
    assert 0 < got[:, 2].norm() < 1e-12 * without[:, 2].norm()
    assert not got[:, 3].any()


@pytest.mark.parametrize("sequences", [1, 20, pytest.param(300, marks=pytest.mark.gpu)])
def test_triton_with_any_number_of_sequences(sequences: int, device: str) -> None:
    case = batch([(3 if i == sequences // 2 else 1, 3 + i % 5) for i in range(sequences)], 1, 1, 16, 4)
    near(run_triton(case, 0.2, 0, device), one_by_one(case, 0.2, 0))


@pytest.mark.parametrize("extended", [False, True], ids=["", "sinks and softcap"])
@pytest.mark.parametrize("window", [0, 600])
@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(2, 1, 32), *(pytest.param(shape, marks=pytest.mark.gpu) for shape in [(32, 8, 64), (24, 8, 128), (4, 1, 256)])],
)
def test_triton_bits_do_not_depend_on_chunking_or_company(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    window: int,
    extended: bool,
    device: str,
    short_splits: None,
) -> None:
    """The last row of a chunk has the same bits as when it is decoded alone, or beside sequences of any length."""
    chunk = batch([(20, 1100)], *shape, 16, dtype)
    more: dict[str, Any] = {"sinks": sinks_of(shape[0]), "softcap": 3.0} if extended else {}
    as_chunk = run_triton(chunk, 0.2, window, device, **more)
    for length in (1100, 1095):
        alone = first_rows(chunk, [(chunk.q[length - 1100 - 1 :][:1], length)])
        company = batch([(1, 3000), (20, 1100)], *shape, 16, dtype)
        beside = first_rows(company, [(company.q[:1], 7), (chunk.q[length - 1100 - 1 :][:1], length)], chunk)
        row = as_chunk[length - 1100 - 1]
        assert torch.equal(run_triton(alone, 0.2, window, device, **more)[0], row)
        assert torch.equal(run_triton(beside, 0.2, window, device, **more)[-1], row)


@pytest.mark.parametrize("window", [0, 200])
def test_triton_bits_do_not_depend_on_bounds_programs_or_padding(
    window: int, device: str, short_splits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a captured step, the bound is far above all lengths, some rows belong to no sequence, and some sequences
    read the scratch page or have no row."""
    from worker.ops.attention import triton as attention

    monkeypatch.setattr(attention, "PARTIAL_BYTES", 1 << 20)
    case = batch([(1, 700), (3, 130)], 2, 1, 32, 16)
    exact = run_triton(case, 0.2, window, device)
    padded = dataclasses.replace(
        case, q=torch.cat((case.q, torch.full_like(case.q, torch.nan))),
        query_start_loc=torch.tensor([0, 1, 4, 4, 5, 5], dtype=torch.int32),
        seq_lens=torch.tensor([700, 130, 1, 1, 0], dtype=torch.int32),
        page_table=F.pad(case.page_table, (0, 300, 0, 3)),
    )  # fmt: skip
    monkeypatch.setattr(attention, "SPLIT_PROGRAMS", 1)
    monkeypatch.setattr(attention, "COMBINE_PROGRAMS", 1)
    assert torch.equal(run_triton(padded, 0.2, window, device, longer=5000)[:4], exact)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "window", "dtype"),
    [(2, 1, 80, 0, torch.float16), (2, 2, 24, 150, torch.float32), (9, 1, 16, 150, torch.float16)],
)
def test_triton_bits_do_not_depend_on_which_rows_are_split(
    heads: int, kv_heads: int, size: int, window: int, dtype: torch.dtype,
    device: str, short_splits: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Splits sequences of one row, of up to two rows, or all sequences. Tiles of a sequence see different splits."""
    from worker.ops.attention import triton as attention

    case = batch([(3, 700), (1, 400), (5, 130)], heads, kv_heads, size, 16, dtype)
    sinks = sinks_of(heads)
    expected = run_triton(case, 0.2, window, device, sinks=sinks)
    near(expected, one_by_one(case, 0.2, window, sinks))
    row_bytes = 4 * heads * (size + 2) * attention.count_splits(700, window, 128, 4)
    for rows in (8, 9):
        monkeypatch.setattr(attention, "PARTIAL_BYTES", row_bytes * rows)
        assert torch.equal(run_triton(case, 0.2, window, device, sinks=sinks), expected)


def test_triton_last_program_of_a_tile_merges_its_splits(
    device: str, short_splits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits stay the same, and all counters are zero again for the next replay. Two sequences have no row."""
    from worker.ops.attention import triton as attention

    monkeypatch.setattr(attention, "PARTIAL_BYTES", 1 << 20)
    options = GpuOptions(last_combine=True, arrivals=torch.zeros(16, dtype=torch.int32, device=device))
    case = batch([(1, 700), (1, 20), (3, 260)], 4, 2, 32, 16)
    case = dataclasses.replace(
        case, query_start_loc=torch.tensor([0, 1, 2, 5, 5, 5], dtype=torch.int32),
        seq_lens=F.pad(case.seq_lens, (0, 2)), page_table=F.pad(case.page_table, (0, 0, 0, 2)),
    )  # fmt: skip
    more: dict[str, Any] = {"sinks": sinks_of(4), "softcap": 3.0}
    expected = run_triton(case, 0.2, 0, device, **more)
    for _ in range(2):
        assert torch.equal(run_triton(case, 0.2, 0, device, options=options, **more), expected)
        assert options.arrivals is not None and not options.arrivals.any()


@pytest.mark.parametrize(
    ("size", "page", "window", "more"), [(16, 8, 200, {"sinks": sinks_of(2), "softcap": 3.0}), (80, 64, 0, {})]
)
def test_triton_softmax_overlap_changes_no_bit(
    size: int, page: int, window: int, more: dict[str, Any], device: str, short_splits: None
) -> None:
    """Tiles begin and end at the first key of a split, block or sequence, or in between. Some tiles are not full."""
    case = batch([(2, 2), (3, 256), (66, 270)], 2, 1, size, page, torch.float16)
    expected = run_triton(case, 0.2, window, device, **more)
    near(expected, one_by_one(case, 0.2, window, **more))
    options = GpuOptions(softmax_overlap=True)
    assert torch.equal(run_triton(case, 0.2, window, device, options=options, **more), expected)


@pytest.mark.parametrize(
    ("size", "page", "window", "more"), [(16, 8, 200, {"sinks": sinks_of(2), "softcap": 3.0}), (80, 64, 0, {})]
)
def test_triton_loop_over_the_blocks_of_each_split_changes_no_bit(
    size: int, page: int, window: int, more: dict[str, Any], device: str, short_splits: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As on GPUs from compute capability 10.0 on. Splits have one, two or more blocks, and windows begin within one."""
    from worker.ops.attention import triton as attention

    case = batch([(2, 2), (3, 256), (66, 270), (9, 1300)], 2, 1, size, page, torch.float16)
    expected = run_triton(case, 0.2, window, device, **more)
    monkeypatch.setattr(attention, "nests_splits", lambda device, dtype: True)
    assert torch.equal(run_triton(case, 0.2, window, device, **more), expected)


def test_triton_nests_splits_where_registers_do_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.ops.attention import triton as attention

    found = {}
    for capability in (80, 89, 90, 100, 120):
        kind = DeviceKind("", capability)
        monkeypatch.setattr(attention, "kind_of", lambda device, kind=kind: kind)
        found[capability] = attention.nests_splits(torch.device("cuda"), torch.bfloat16)
        assert not attention.nests_splits(torch.device("cuda"), torch.float32)
    assert found == {80: False, 89: False, 90: False, 100: True, 120: True}


@pytest.mark.parametrize(
    ("size", "dtype", "fp8", "overlaps"),
    [
        (128, torch.float16, False, True), (128, torch.float16, True, False), (128, torch.float32, False, False),
        (192, torch.float16, False, False),
    ],
)  # fmt: skip
def test_triton_overlaps_the_softmax_where_products_run_by_themselves(
    size: int, dtype: torch.dtype, fp8: bool, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The softmax does not overlap if keys must be converted, if registers do not suffice, or if the option is off."""
    from worker.ops.attention import triton as attention

    launched = []

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            return lambda *args, **how: launched.append(how["OVERLAP"])

    monkeypatch.setattr(attention, "_prefill_kernel", Kernel())
    case = batch([(3, 20)], 2, 1, size, 16, dtype)
    for options in (GpuOptions(softmax_overlap=True), NO_OPTIONS):
        run_triton(in_fp8(case) if fp8 else case, 0.2, 0, "cpu", options=options)
    assert launched == [overlaps, False]


def test_count_splits_covers_every_position() -> None:
    from worker.ops.attention.triton_shared import count_splits

    begins = [*range(0, 1024, 128), *range(1024, 4096, 512), *range(4096, 100_000, 2048)]
    for length in (1, 128, 129, 1024, 1025, 4096, 4097, 9000, 65_536):
        assert count_splits(length, 0, 128, 8) == sum(begin < length for begin in begins)
    for last in range(1000):  # last position of a window of 300 keys, at any place
        assert count_splits(last + 1, 300, 128, 8) >= last // 128 - max(0, last - 299) // 128 + 1


def first_rows(case: Batch, rows: list[tuple[Tensor, int]], other: Batch | None = None) -> Batch:
    """Returns decodes over the caches of `case`.

    The last row decodes `other`'s only sequence, which is added to the pool.
    """
    cache_k, cache_v, pages = case.cache_k, case.cache_v, case.page_table[: len(rows)]
    if other is not None:
        cache_k, cache_v = torch.cat((cache_k, other.cache_k)), torch.cat((cache_v, other.cache_v))
        width = min(pages.shape[1], other.page_table.shape[1])
        pages = torch.cat((pages[:-1, :width], other.page_table[:, :width] + case.cache_k.shape[0])).contiguous()
    count = len(rows)
    return Batch(
        torch.cat([q for q, _ in rows]), cache_k, cache_v, torch.arange(count + 1, dtype=torch.int32),
        torch.tensor([kv for _, kv in rows], dtype=torch.int32), pages,
        (), (), max(kv for _, kv in rows),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lengths", "bound"),
    [([(1, 500)] * 63 + [(1, 1 << 15)], 1 << 18), ([(64, 100_064)], 100_064), ([(1, 1 << 10)] * 256, 1 << 13)],
)
def test_divide_work_launches_few_programs_and_splits_short_pieces(
    lengths: list[tuple[int, int]], bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a 3B model's heads on an H200: few programs for each multiprocessor, and partial results fit in memory."""
    from worker.ops.attention import triton as attention

    monkeypatch.undo()  # undoes the small limits that the other tests need
    tokens, sequences, heads, kv_heads, size = sum(rows for rows, _ in lengths), len(lengths), 24, 8, 128
    tiles = attention.choose_tiles(size, 3, torch.bfloat16, 227 << 10)
    splits = attention.count_splits(bound, 0, attention.SPLIT_SIZE, attention.SHORT_SPLITS)
    work = attention.divide_work(tokens, sequences, heads, kv_heads, size, splits, tiles, 132)
    assert work.max_rows >= max(rows for rows, _ in lengths) and work.prefill_programs == 0
    assert 132 <= kv_heads * work.split_programs <= 4 * 132 + kv_heads
    assert 4 * work.places * splits * heads * (size + 2) <= attention.PARTIAL_BYTES
    for rows in (300, 8192):  # enough tiles without splits, for one sequence or after a few decodes
        alone = attention.divide_work(rows, 1, heads, kv_heads, size, splits, tiles, 2)
        assert alone.max_rows == alone.split_programs == alone.combine_programs == 0 < alone.prefill_programs
