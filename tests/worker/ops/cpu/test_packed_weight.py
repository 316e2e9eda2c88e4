"""Products with packed weights of a few bits give the rows of the dequantized weight, on every instruction set."""

import pytest
import torch
from torch import Tensor

from tests.pairs import in_pairs
from tests.worker.ops.harness.cases import random
from tests.worker.ops.harness.cpu_tiers import FUNCTIONS, HERE, tier  # noqa: F401
from tests.worker.ops.harness.quantized import CODE_MAPS, quantized
from worker.ops import native as c_library
from worker.ops.linear import native as linear_native
from worker.ops.linear.native import INTEGER4, INTEGER8, pack_weight
from worker.ops.native import multiplies_bf16
from worker.ops.quantized_weight import E4M3, INT4, INT8, NF4, CodeMap, QuantizedWeight

SHAPES = [(32, 64), (70, 336), (96, 2176)]
FORMATS = [
    (one, minimum) for one in CODE_MAPS for minimum in (False, True) if not (minimum and one is E4M3)
]  # no format is both


def relative_error(ours: Tensor, x: Tensor, weight: QuantizedWeight) -> float:
    expected = x.double() @ weight.dequantize(torch.float64).T
    return ((ours - expected).norm() / expected.norm()).item()


def tolerance(code_map: CodeMap, dtype: torch.dtype, kind: int) -> float:
    """Returns the largest relative error that products of random inputs may have. kind: kind of the packed weight"""
    if dtype == torch.bfloat16 and code_map is NF4 and multiplies_bf16():
        return 3e-3  # this kind rounds values to bf16
    if kind in (INTEGER4, INTEGER8):
        # An input becomes an integer times a power of two, which its block of at most 128 inputs shares. The largest
        # integer has 15 bits, so the error of an input is at most 2^-15 of the largest input. An input of at least 2^-7
        # of the largest has no error, because a bf16 number has 8 bits. The largest of 128 normal numbers is below 5
        # standard deviations, and 2 x 0.4 x 5 x 2^-7 = 3 % of the numbers are below 2^-7 of it. So the error of a
        # product of random inputs is below sqrt(3 % / 3) x 5 x 2^-15 = 1.5e-5 of its size. Twice that leaves room for
        # chance. With AMX, inputs to codes of eight bits have three bits fewer.
        return 3e-5 * (8 if kind == INTEGER8 and c_library.tier() == "amx" else 1)
    return 1e-6  # inputs and values are exact, sums are float32


@pytest.mark.usefixtures("tier")
@in_pairs(FUNCTIONS | {"n, k": SHAPES, "code_map, minimum": FORMATS}, indirect=["tier"])
def test_product_is_that_of_the_dequantized_weight_in_every_row(
    code_map: CodeMap, n: int, k: int, dtype: torch.dtype, minimum: bool
) -> None:
    for group_size in (16, 32, 48, 128, 144, k):
        weight = quantized(code_map, n, k, group_size, minimum=minimum)
        packed, x = pack_weight([weight], dtype=dtype), random(70, k, dtype=dtype)
        whole = linear_native.linear(x, packed, out_dtype=torch.float32)
        assert relative_error(whole, x, weight) < tolerance(code_map, dtype, packed.parts[0].kind)
        for rows in (1, 2, 3, 5, 16, 17, 33):
            assert torch.equal(linear_native.linear(x[:rows], packed, out_dtype=torch.float32), whole[:rows])


@pytest.mark.parametrize("magnitude", [1e-33, 1e-20, 1.0, 1e30])
def test_inputs_within_seven_octaves_are_not_rounded(magnitude: float) -> None:
    weight = quantized(INT4, 70, 336, 48)
    x = (torch.rand(9, 336) * 0.98 + 0.02) * torch.randint(0, 2, (9, 336)).mul(2).sub(1)
    x = (x * magnitude).bfloat16()
    assert (
        relative_error(
            linear_native.linear(x, pack_weight([weight], dtype=x.dtype), out_dtype=torch.float32), x, weight
        )
        < 1e-6
    )


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("rows", [1, 7])
def test_an_input_that_is_not_finite_shows_in_its_row_only(number: float, rows: int) -> None:
    weight, x = quantized(INT8, 70, 336, 336), random(rows + 1, 336, dtype=torch.bfloat16)
    x[0, 200] = number
    found = linear_native.linear(x, pack_weight([weight], dtype=x.dtype), out_dtype=torch.float32)
    assert not found[0].isfinite().any() and found[1:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_in_several_formats_give_neighbouring_columns(dtype: torch.dtype) -> None:
    plain, bias = random(40, 272, dtype=dtype), random(206, dtype=dtype)
    parts = [quantized(INT4, 70, 272, 32), plain, quantized(INT8, 96, 272, 272)]
    packed = pack_weight(parts, bias, dtype=dtype)
    x = random(45, 272, dtype=dtype)
    for rows in (1, 45):
        whole, begin = linear_native.linear(x[:rows], packed), 0
        for part in parts:
            end = begin + part.shape[0]
            alone = linear_native.linear(x[:rows], pack_weight([part], bias[begin:end], dtype=dtype))
            assert torch.equal(whole[:, begin:end], alone)
            begin = end
        assert begin == packed.n == whole.shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_taken_in_the_order_of_the_codes(dtype: torch.dtype) -> None:
    weight = quantized(INT4, 64, 160, 32)
    order = torch.randperm(160, generator=torch.Generator().manual_seed(3))
    ordered = QuantizedWeight(weight.codes, INT4, weight.scale, None, 32, order)
    x = random(9, 160, dtype=dtype)
    ours = linear_native.linear(x, pack_weight([ordered], dtype=dtype))
    assert torch.equal(ours, linear_native.linear(x[:, order].contiguous(), pack_weight([weight], dtype=dtype)))
    assert torch.equal(ordered.dequantize(dtype)[:, order], weight.dequantize(dtype))


def test_tiny_and_huge_scales_survive_sixteen_bits() -> None:
    for exponent in (-60, 60):
        weight = quantized(INT4, 32, 64, 32)
        scaled = QuantizedWeight(weight.codes, INT4, weight.scale * 2.0**exponent, None, 32)
        x = random(3, 64, dtype=torch.bfloat16)
        ours = linear_native.linear(x, pack_weight([scaled], dtype=torch.bfloat16), out_dtype=torch.float32)
        plain = linear_native.linear(x, pack_weight([weight], dtype=torch.bfloat16), out_dtype=torch.float32)
        assert torch.equal(ours, plain * 2.0**exponent)


@pytest.mark.usefixtures("tier")
@in_pairs({"tier": HERE, "code_map": CODE_MAPS, "rows": [1, 40]}, indirect=["tier"])
def test_tiny_and_huge_inputs_give_the_same_digits(rows: int, code_map: CodeMap) -> None:
    x = random(rows, 64, dtype=torch.bfloat16)
    packed = pack_weight([quantized(code_map, 40, 64, 32)], dtype=torch.bfloat16)
    plain = linear_native.linear(x, packed, out_dtype=torch.float32)
    for exponent in (-60, 60):
        ours = linear_native.linear(x * 2.0**exponent, packed, out_dtype=torch.float32)
        assert torch.equal(ours, plain * 2.0**exponent)
