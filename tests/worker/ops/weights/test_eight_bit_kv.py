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
    largest, wide = x.float().abs().amax(-1, keepdim=True), x.float()
    torch.testing.assert_close(scales(rows), largest[..., 0] / LARGEST[codes], rtol=1e-6, atol=0)
    half = largest / 127 / 2 if codes == torch.int8 else (wide.abs() / 16).maximum(largest / 448 / 2**10)
    error = (dequantize_rows(rows, codes, 24, torch.float32) - wide).abs()
    assert (error <= half * 1.0001).all() and (error > 0).any()


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
def test_rows_in_four_bits_keep_their_numbers_within_half_a_step_of_their_group(d: int, dtype: torch.dtype) -> None:
    """A step is 1/7 of the group's largest number, which is rounded up to a multiple of 1/18 of the row's largest."""
    x = (random(30, 2, d) * torch.logspace(-6, 6, 30)[:, None, None]).to(dtype)
    x[..., 32:] *= 0.3  # groups of different sizes
    rows, wide = quantize_rows(x, FOUR_BITS), x.float()
    assert rows.shape == (30, 2, row_elements(d, FOUR_BITS, "cpu")) and rows.dtype == torch.uint8
    largest = wide.abs().amax(-1, keepdim=True)
    of_group = torch.cat([part.abs().amax(-1, keepdim=True).expand(part.shape) for part in wide.split(32, -1)], -1)
    error = (dequantize_rows(rows, FOUR_BITS, d, torch.float32) - wide).abs()
    assert (error <= (of_group + largest / 18) / 7 / 2 * 1.0001).all() and (error > 0).any()


def test_numbers_that_codes_of_four_bits_have_are_kept_exactly() -> None:
    """Two numbers are in a byte, the first in its low bits; multipliers and the scale follow."""
    row = torch.cat((torch.arange(-7.0, 8.0).repeat(3)[:32] * 18, torch.arange(-7.0, 8.0)))
    rows = quantize_rows(row[None], FOUR_BITS)
    assert rows[0, [0, 1, 24, 25]].tolist() == [9 | 10 << 4, 11 | 12 << 4, 18, 1]
    for factor in (1.0, 2.0**-20, 2.0**20):
        rows = quantize_rows(row[None] * factor, FOUR_BITS)
        assert torch.equal(dequantize_rows(rows, FOUR_BITS, 47, torch.float32), row[None] * factor)


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
