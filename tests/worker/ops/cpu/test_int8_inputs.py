"""Products of codes with inputs that are rounded to 8 bits: compared with plain sums of integers, on every tier."""

import pytest
import torch
from torch import Tensor

from tests.worker.ops.cpu.test_integer_codes import PARTS, ROWS, drawn, inputs
from tests.worker.ops.harness.cpu_tiers import FASTER, HERE, dtypes, needs_library, use
from worker.ops.linear import native as linear_native
from worker.ops.linear.native import INT8_INPUTS4, INT8_INPUTS8, CpuWeight, pack_weight
from worker.ops.quantized_weight import (
    E2M1,
    E4M3,
    INT4,
    INT8,
    IQ1,
    IQ2,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    NF4,
    CodeMap,
    QuantizedWeight,
)  # fmt: skip

pytestmark = needs_library
TIERS = [*HERE, *FASTER]
BLOCK = 32  # inputs that share a scale
# code map, inputs of a group, whether there are minimums, n, k
SHAPES = [
    (INT4, 32, False, 96, 256), (INT4, 32, True, 70, 96), (INT4, 128, False, 33, 1024), (INT4, 128, True, 64, 160),
    (INT4, 16, True, 40, 48), (INT4, 48, True, 31, 240), (INT4, 4096, False, 65, 1000), (INT4, 32, True, 1, 17),
    (E2M1, 32, False, 40, 128), (E2M1, 16, True, 33, 80), (IQ4_NL, 32, False, 64, 224), (IQ4_NL, 16, True, 40, 33),
    (INT8, 32, False, 96, 256), (INT8, 16, False, 70, 272), (INT8, 32, True, 33, 40), (INT8, 128, False, 64, 416),
    (INT8, 4096, True, 17, 72), (IQ3_S, 32, False, 40, 96), (IQ3_XXS, 32, False, 33, 64), (IQ2, 16, False, 40, 80),
    (IQ1, 32, False, 64, 64),
]  # fmt: skip
shapes = pytest.mark.parametrize("code_map, group, minimum, n, k", SHAPES)


def packed(weight: QuantizedWeight, dtype: torch.dtype = torch.bfloat16) -> CpuWeight:
    return pack_weight([weight], dtype=dtype, int8_inputs=True)


def product(x: Tensor, weight: CpuWeight) -> Tensor:
    return linear_native.linear(x, weight, out_dtype=torch.float32)


def rounded(x: Tensor) -> Tensor:
    """Returns the inputs [T, K] float64 that x stands for when its blocks are rounded to 8 bits."""
    t, k = x.shape
    blocks = torch.nn.functional.pad(x.float(), (0, -k % BLOCK)).view(t, -1, BLOCK)
    largest = blocks.abs().amax(2, keepdim=True)
    integers = torch.where(largest > 0, blocks * (127 / largest), 0.0).round()
    return (integers.double() * (largest / 127)).view(t, -1)[:, :k]


def whole_inputs(k: int, dtype: torch.dtype) -> Tensor:
    """Returns rows [5, K] whose blocks are integers times a power of two, with 127 in every block."""
    x = torch.randint(-127, 128, (5, k)).float()
    x[:, ::BLOCK] = 127
    x[0], x[1] = 127, -127
    return (x * torch.tensor([1.0, 1.0, 0.25, 8.0, 2.0**-20])[:, None]).to(dtype)


@pytest.mark.parametrize("which", TIERS)
@dtypes
@shapes
def test_sums_of_integers_are_exact(
    which: str, dtype: torch.dtype, code_map: CodeMap, group: int, minimum: bool, n: int, k: int
) -> None:
    """All scales are powers of two, so that nothing is rounded, and the product is that of plain integers."""
    torch.manual_seed(k)
    weight = drawn(code_map, n, k, group, minimum)
    weight.scale.copy_(torch.randint(-2, 1, weight.scale.shape).float().exp2())
    if weight.minimum is not None:
        weight.minimum.copy_(torch.randint(-8, 9, weight.minimum.shape) * 0.25)
    x = whole_inputs(k, dtype)
    with use(which):
        found = product(x, packed(weight, dtype))
    assert torch.equal(found.double(), x.double() @ weight.dequantize(torch.float32).double().T)


@shapes
@dtypes
def test_every_tier_has_the_same_bits_for_a_row_in_any_company(
    dtype: torch.dtype, code_map: CodeMap, group: int, minimum: bool, n: int, k: int
) -> None:
    torch.manual_seed(k)
    weight, x = drawn(code_map, n, k, group, minimum), inputs(k).to(dtype)
    results = {}
    for which in TIERS:
        with use(which):
            one = packed(weight, dtype)
            assert one.parts[0].kind == (INT8_INPUTS4 if code_map.bits == 4 else INT8_INPUTS8)
            results[which] = product(x, one).view(torch.int32)
            for first, end in PARTS:
                part = product(x[first:end].contiguous(), one).view(torch.int32)
                assert torch.equal(part, results[which][first:end]), (which, first, end)
    first_result = results[TIERS[0]]
    assert all(torch.equal(one, first_result) for one in results.values())
    lost = torch.tensor([not x[row].isfinite().all() for row in range(ROWS)])
    values = first_result.view(torch.float32)
    assert values[lost].isnan().all() and values[~lost].isfinite().all()


@pytest.mark.parametrize("which", TIERS)
@shapes
def test_results_are_those_of_rounded_inputs(
    which: str, code_map: CodeMap, group: int, minimum: bool, n: int, k: int
) -> None:
    torch.manual_seed(n)
    weight, x = drawn(code_map, n, k, group, minimum), torch.randn(3, k)
    with use(which):
        found = product(x, packed(weight, torch.float32)).double()
    exact = rounded(x) @ weight.dequantize(torch.float32).double().T
    assert float((found - exact).abs().max()) <= 1e-5 * float(exact.abs().max())


def test_inputs_in_another_order_are_rounded_in_the_order_of_the_weight() -> None:
    torch.manual_seed(0)
    weight, order, x = drawn(INT4, 40, 96, 32, True), torch.randperm(96), torch.randn(3, 96).bfloat16()
    ordered = QuantizedWeight(weight.codes, INT4, weight.scale, weight.minimum, 32, order)
    assert torch.equal(product(x, packed(ordered)), product(x[:, order].contiguous(), packed(weight)))


def test_tiny_inputs_are_zeros() -> None:
    weight = drawn(INT4, 8, 64, 32, True)
    x = torch.full((2, 64), 1e-30)
    x[1, :32] = 1.0
    found = product(x, packed(weight, torch.float32))
    assert not found[0].any() and found[1].all()


def test_other_codes_keep_their_inputs() -> None:
    """NF4 and E4M3 are no integers, and plain weights have no codes."""
    for code_map in (NF4, E4M3):
        weight, x = drawn(code_map, 40, 64, 32, False), torch.randn(3, 64).bfloat16()
        assert torch.equal(product(x, packed(weight)), product(x, pack_weight([weight], dtype=torch.bfloat16)))


def test_parts_in_several_formats_share_a_product() -> None:
    torch.manual_seed(1)
    few, eight = drawn(INT4, 40, 96, 32, True), drawn(INT8, 30, 96, 16, False)
    plain, x = torch.randn(20, 96).bfloat16(), torch.randn(9, 96).bfloat16()
    bias = torch.randn(90)
    for parts in ([few, plain, eight], [few, eight]):
        count = sum(part.shape[0] for part in parts)
        together = product(x, pack_weight(parts, bias[:count], dtype=torch.bfloat16, int8_inputs=True))
        alone = [product(x, pack_weight([part], dtype=torch.bfloat16, int8_inputs=True)) for part in parts]
        assert torch.equal(together, torch.cat(alone, 1) + bias[:count])
