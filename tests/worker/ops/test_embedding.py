"""Rows of an embedding in the blocks of a GGUF file have the bits of the dequantized table, whatever the format."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.gguf_blocks import random_rows
from tests.worker.ops.harness.cpu_tiers import needs_library, tier  # noqa: F401
from worker.ops import block_rows
from worker.ops import native as c_library
from worker.ops.block_rows import BlockFormat, BlockRows
from worker.ops.embedding import Embedding, in_head, plain
from worker.ops.embedding import native as embedding_in_c
from worker.ops.linear.native import pack_weight
from worker.quantization.gguf import FORMATS

N, H = 70, 512
IDS = torch.tensor([3, 0, 69, 3, *range(20, 60)])  # the first ids in no order and twice; enough for several threads
DTYPES = [torch.float32, torch.bfloat16]
WITH_SCALES = [format for format in FORMATS.values() if format.scales is not None]
every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))


def rows_of(format: BlockFormat, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(random_rows(N, H, format.name, np.random.default_rng(seed), 0.05))


def extreme_rows(format: BlockFormat) -> torch.Tensor:
    """Returns rows of random bytes, without those with an infinite scale or a NaN; some scales are denormal."""
    rows = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (600, format.nbytes), dtype=np.uint8))
    weight = format.quantized_weight(rows)
    finite = weight.dequantize(torch.float32).isfinite().all(1)
    assert int(finite.sum()) > N
    return rows[finite]


@needs_library
@every_format
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("made", [rows_of, extreme_rows])
def test_rows_have_the_bits_of_the_dequantized_table(
    format: BlockFormat,
    dtype: torch.dtype,
    made: Callable[[BlockFormat], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = made(format)
    with monkeypatch.context() as patch:
        patch.setattr(block_rows, "unpack_blocks", lambda *_: False)  # PyTorch alone defines the table
        table = format.quantized_weight(stored).dequantize(dtype)
    embedding = Embedding(stored, dtype, format)
    assert embedding.shape == table.shape and len(embedding) == len(table) and embedding.nbytes == stored.nbytes
    for ids in (IDS, IDS[:1], IDS[:0]):
        out = torch.full((len(ids), table.shape[1]), torch.nan, dtype=dtype)
        expected = table[ids].view(torch.uint8)
        assert torch.equal(embedding.rows(ids).view(torch.uint8), expected)
        assert embedding.rows(ids, out) is out and torch.equal(out.view(torch.uint8), expected)


@needs_library
@pytest.mark.parametrize("format", WITH_SCALES, ids=lambda format: format.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_read_from_a_tied_head(format: BlockFormat, dtype: torch.dtype, tier: str) -> None:  # noqa: F811
    """The tiers and dtypes have the codes in four orders. Scales in a packed weight for bfloat16 inputs are rounded."""
    for stored in (rows_of(format), extreme_rows(format)[:N]):
        rows = BlockRows(stored, format)
        table = rows.dequantize(dtype)
        for int8_inputs in (False, True):
            head = pack_weight([rows], dtype=dtype, int8_inputs=int8_inputs)
            embedding = in_head(rows, head, dtype)
            assert embedding.shape == table.shape and embedding.nbytes < stored.nbytes / 2
            for ids in (IDS, IDS[:1], torch.arange(N)):
                out = torch.empty(len(ids), table.shape[1], dtype=dtype)
                assert embedding.rows(ids, out) is out and torch.equal(
                    out.view(torch.uint8), table[ids].view(torch.uint8)
                )
            assert torch.equal(embedding.table(), table) and embedding.equals(table)
            for wrong in (-1, N, 1 << 40):
                with pytest.raises(IndexError):
                    embedding.rows(torch.tensor([0, wrong]))


@every_format
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_pytorch_reads_the_same_rows(format: BlockFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_rows, "kernels", dict)  # as without a C compiler
    embedding = Embedding(rows_of(format), dtype, format)
    out = torch.empty(len(IDS), H, dtype=dtype)
    assert not format.is_unpacked_in_c and torch.equal(embedding.rows(IDS), embedding.table()[IDS])
    assert torch.equal(embedding.rows(IDS, out), embedding.table()[IDS])


@needs_library
def test_c_reads_the_rows_of_an_embedding_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, the tests above could compare PyTorch with itself."""
    format, calls, rows = FORMATS["Q6_K"], [0], embedding_in_c.rows

    def counted(*arguments: object) -> torch.Tensor:
        calls[0] += 1
        return rows(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(embedding_in_c, "rows", counted)
    Embedding(rows_of(format), torch.bfloat16, format).rows(IDS)
    assert calls == [1]


@needs_library
@pytest.mark.parametrize("wrong", [-1, N, 1 << 40, -(1 << 40)])
def test_an_id_outside_of_the_table_is_an_error(wrong: int) -> None:
    format = FORMATS["Q4_K"]
    with pytest.raises(IndexError):
        Embedding(rows_of(format), torch.float32, format).rows(torch.tensor([0, wrong]))


def test_torch_refuses_an_id_outside_of_a_plain_table() -> None:
    for wrong in (-1, N):
        with pytest.raises(IndexError):
            plain(torch.zeros(N, H)).rows(torch.tensor([0, wrong]))


@pytest.mark.parametrize("format", [None, FORMATS["Q8_0"]])
def test_equals_finds_a_difference_in_any_row(format: BlockFormat | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.ops.embedding.ROWS_AT_ONCE", 32)
    embedding = plain(torch.randn(N, H)) if format is None else Embedding(rows_of(format), torch.float32, format)
    same = embedding.table().clone()
    assert embedding.equals(same) and not embedding.equals(same[:-1])
    for row in (0, 31, 32, N - 1):
        other = same.clone()
        other[row, 7] += 1
        assert not embedding.equals(other)


def test_plain_numbers_are_read_as_they_are() -> None:
    table = torch.randn(N, H).bfloat16()
    embedding = plain(table)
    assert embedding.table() is table and torch.equal(embedding.rows(IDS), table[IDS])
    assert embedding.like.shape == (0, H) and embedding.like.dtype == torch.bfloat16
    assert embedding.nbytes == table.nbytes and embedding.shape == (N, H)


@every_format
def test_the_largest_scale_is_found_in_c(format: BlockFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of random bytes have scales and minimums that are infinite or NaN."""
    assert c_library.available(torch.float32), "needs a C compiler"
    rng = np.random.default_rng(6)
    bad = torch.from_numpy(rng.integers(0, 256, (4000, format.nbytes), dtype=np.uint8))
    each = [BlockRows(one[None], format) for one in bad[:300]] + [BlockRows(bad, format), BlockRows(bad[:0], format)]
    found = [one.largest() for one in (*each, BlockRows(rows_of(format), format))]
    monkeypatch.setattr(block_rows, "kernels", dict)
    defined = [one.largest() for one in (*each, BlockRows(rows_of(format), format))]
    finite = [np.isfinite(one) for one in defined]
    assert [np.isfinite(one) for one in found] == finite and finite[-1] and found[-2] == 0
    assert all(one == other for one, other, fine in zip(found, defined, finite, strict=True) if fine)
