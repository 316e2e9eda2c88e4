"""K/V rows in eight or four bits with a scale: how a number is rounded, and where the scale is stored."""

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.cases import random
from worker.ops.paged_kv import CODED, FOUR_BITS, LARGEST, dequantize_rows, has_scales, quantize_rows, row_elements

EIGHT = pytest.mark.parametrize("codes", list(LARGEST))
CODES = pytest.mark.parametrize("codes", list(CODED))


def scales(rows: Tensor) -> Tensor:
    return rows[..., -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)[..., 0]


@EIGHT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_keep_their_numbers_within_half_a_code(codes: torch.dtype, dtype: torch.dtype) -> None:
    x = (random(30, 2, 24) * torch.logspace(-6, 6, 30)[:, None, None]).to(dtype)
    rows = quantize_rows(x, codes)
    assert rows.shape == (30, 2, 28) and rows.dtype == torch.uint8
    wide = kept(x, codes)
    largest = wide.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scales(rows), largest[..., 0] / LARGEST[codes], rtol=1e-6, atol=0)
    half = largest / 127 / 2 if codes == torch.int8 else (wide.abs() / 16).maximum(largest / 448 / 2**10)
    error = (kept(dequantize_rows(rows, codes, 24, torch.float32), codes) - wide).abs()
    assert (error <= half * 1.0001).all() and (error > 0).any()


def kept(x: Tensor, codes: torch.dtype) -> Tensor:
    """Returns rows [..., 24] as they are rounded: in int8, each block of 8 elements is rotated."""
    wide = x.float()
    return (wide.view(*x.shape[:-1], 3, 8) @ hadamard(8) / 8).view(x.shape) if codes == torch.int8 else wide


def test_a_few_large_numbers_leave_the_others_their_precision_in_int8() -> None:
    """A key of Qwen2.5 has such numbers. Alone they would make a step of 2.2, and errors of 0.63."""
    x = random(200, 64) * 6
    x[:, 31], x[:, 63] = 278.0, -150.0
    assert (dequantize_rows(quantize_rows(x, torch.int8), torch.int8, 64, torch.float32) - x).std() < 0.25


@EIGHT
def test_numbers_that_codes_have_are_kept_exactly(codes: torch.dtype) -> None:
    every = torch.arange(-128, 128).to(torch.int8).view(codes).float()
    row = every[every.isfinite() & (every.abs() <= LARGEST[codes])][None]
    for factor in (1.0, 2.0**-20, 2.0**20):
        assert torch.equal(
            dequantize_rows(quantize_rows(row * factor, codes), codes, row.shape[1], torch.float32), row * factor
        )


@pytest.mark.parametrize("d", [7, 32, 64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_four_bits_keep_their_numbers_roughly(d: int, dtype: torch.dtype) -> None:
    """The error is that of 16 steps for a group of 32 numbers, also if one number of a row is much larger."""
    x = (random(30, 2, d) * torch.logspace(-6, 6, 30)[:, None, None]).to(dtype)
    x[:, 1, 3] *= 20
    rows, wide = quantize_rows(x, FOUR_BITS), x.float()
    assert rows.shape == (30, 2, row_elements(d, FOUR_BITS, "cpu")) and rows.dtype == torch.uint8
    error = (dequantize_rows(rows, FOUR_BITS, d, torch.float32) - wide).norm(dim=-1) / wide.norm(dim=-1)
    assert 0.01 < error.mean() < 0.1 and error.max() < 0.2


def test_numbers_that_codes_of_four_bits_have_are_kept_exactly() -> None:
    """Two numbers are in a byte, the first in its low bits; multipliers and the scale follow."""
    rotated = torch.cat((torch.arange(-8.0, 8.0).repeat(2) * 15, torch.arange(-8.0, 8.0).repeat(2) * -3))
    whole = hadamard(64) @ rotated
    rows = quantize_rows(whole[None], FOUR_BITS)
    assert rows[0, [0, 1, 16, 17]].tolist() == [8 | 9 << 4, 10 | 11 << 4, 8 | 9 << 4, 10 | 11 << 4]
    assert rows[0, 32:34].view(torch.int8).tolist() == [15, -3]
    for factor in (1.0, 2.0**-20, 2.0**20):
        rows = quantize_rows(whole[None] * factor, FOUR_BITS)
        assert torch.equal(dequantize_rows(rows, FOUR_BITS, 64, torch.float32), whole[None] * factor)


def hadamard(size: int) -> Tensor:
    """Returns a Hadamard matrix by Sylvester's construction."""
    if size == 1:
        return torch.ones(1, 1)
    half = hadamard(size // 2)
    return torch.cat((torch.cat((half, half), 1), torch.cat((half, -half), 1)))


@CODES
def test_rows_of_zeros_and_of_almost_nothing_become_zeros(codes: torch.dtype) -> None:
    rows = quantize_rows(torch.stack((torch.zeros(16), torch.full((16,), 1e-38))), codes)
    assert not rows.any()


@CODES
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so(codes: torch.dtype, bad: float) -> None:
    x = torch.ones(2, 8)
    x[1, 3] = bad
    assert scales(quantize_rows(x, codes)).isfinite().tolist() == [True, False]


def test_rows_have_scales_on_the_cpu_only() -> None:
    assert [row_elements(64, codes, "cpu") for codes in CODED] == [68, 68, 38]
    assert row_elements(64, torch.float8_e4m3fn, "cuda") == row_elements(64, torch.bfloat16, "cpu") == 64
    assert has_scales(torch.zeros(2, 68, dtype=torch.int8), 64)
    assert not has_scales(torch.zeros(2, 68), 64) and not has_scales(torch.zeros(2, 68, dtype=torch.int8), 68)
