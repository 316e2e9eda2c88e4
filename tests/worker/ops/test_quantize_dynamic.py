"""Products of eight-bit weights and eight-bit activations, which are quantized row by row during the step."""

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.cases import TRITON_DTYPES, close, near, poisoned, random
from worker.ops.activation import act_and_mul
from worker.ops.linear import gated_linear, linear
from worker.ops.linear.packed import PackedLinear, pack_quantized
from worker.ops.norm.reference import sum_split_k
from worker.ops.quantized_weight import (  # fmt: skip
    FORMATS,
    Kind,
    dequantize,
    linear_quantized_torch,
    quantize,
    quantize_tokens,
)

KINDS: list[Kind] = ["int8", "fp8"]
# half a rounding step: int8 relative to the row's largest value, fp8 relative to the value
STEP = {"int8": 1 / 254, "fp8": 1 / 16}


def tokens(rows: int, depth: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Returns rows of very different magnitudes, with one column much larger than the others."""
    x = random(rows, depth, device=device) * torch.logspace(-2, 2, rows, device=device)[:, None]
    x[:, depth // 3] *= 30
    return x.to(dtype)


def product(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None, **how: bool) -> Tensor:
    from worker.ops.linear.triton import linear_triton

    return linear_triton(x, values, bias, scale, dynamic=True, **how)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_at_most_half_a_step_off(kind: Kind) -> None:
    x = tokens(40, 200)
    values, scale = quantize_tokens(x, FORMATS[kind])
    largest = x.abs().amax(dim=1, keepdim=True)
    relative_to = largest if kind == "int8" else torch.maximum(x.abs(), largest / 448 / 32)
    assert bool(((values.float() * scale[:, None] - x).abs() <= relative_to * STEP[kind] * 1.001).all())
    assert bool((values.float().abs().amax(dim=1) == (127 if kind == "int8" else 448)).all())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dynamic_linear_equals_the_product_of_quantized_tokens(kind: Kind, biased: bool) -> None:
    x, (weight, scale) = tokens(5, 70), quantize(random(33, 70, seed=1), kind)
    bias = random(33, seed=2) if biased else None
    values, token_scale = quantize_tokens(x, FORMATS[kind])
    expected = dequantize(values, token_scale, torch.float64) @ dequantize(weight, scale, torch.float64).T
    expected += 0 if bias is None else bias.double()
    ready = PackedLinear(weight, bias, True, scale=scale, dynamic=True)
    close(linear(x, ready), expected.float())
    assert (
        linear(x.half(), ready).dtype == torch.float16 and linear(x.half(), ready, fp32_out=True).dtype == torch.float32
    )
    near(gated_linear(x[:, :70], PackedLinear(weight[:32], None, True, scale=scale[:32], dynamic=True), "silu"),
         act_and_mul(expected[:, :32] - (0 if bias is None else bias.double()[:32]), "silu"))  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_dynamic_linear_without_a_gpu_does_not_quantize_tokens(kind: Kind) -> None:
    x, eight = tokens(5, 70), quantize(random(33, 70, seed=1), kind)
    ready, plain = (
        pack_quantized(*eight, dtype=torch.float32, invariant=True, dynamic=dynamic) for dynamic in (True, False)
    )
    assert torch.equal(linear(x, ready), linear(x, plain))


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "depth"), [(1, 70), (50, 333), (3, 1152), (2, 9000)])
def test_triton_quantizes_to_the_same(rows: int, depth: int, kind: Kind, dtype: torch.dtype, device: str) -> None:
    from worker.ops.triton_common import quantize_tokens_triton

    x = random(rows, 2 * depth, device=device).to(dtype)[:, depth:]  # strided
    x[0, 0], x[-1] = 3e4, x[-1] * 1e-4
    with poisoned():
        values, scale = quantize_tokens_triton(x, FORMATS[kind])
    expected = quantize_tokens(x, FORMATS[kind])
    assert values.dtype == FORMATS[kind] and torch.equal(scale, expected[1])
    assert torch.equal(values.float(), expected[0].float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # a warning of the interpreter
def test_quantize_tokens_keeps_zero_rows_and_isolates_non_finite_rows(kind: Kind, device: str) -> None:
    x, eight = random(5, 300, device=device), quantize(random(40, 300, device=device, seed=1), kind)
    x[1], x[2, 7], x[3, 9] = 0, torch.nan, torch.inf
    for got in (product(x, *eight), linear_quantized_torch(x, *eight, None, dynamic=True)):
        assert not got[1].any() and not got[2:4].isfinite().any()
        near(got[[0, 4]], linear_quantized_torch(x[[0, 4]], *eight, None, dynamic=True))


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "biased"),
    [
        (1, 48, 70, True),
        (5, 130, 600, True),  # two chains along K
        (20, 64, 1024, False),  # four equal chains
        (70, 40, 600, False),
        (130, 66, 72, True),
    ],
)
def test_linear_with_dynamic_quantization_triton_agrees_with_torch(
    rows: int, columns: int, depth: int, biased: bool, kind: Kind, dtype: torch.dtype, device: str
) -> None:
    x = tokens(rows, depth, dtype, device)
    eight = quantize(random(columns, depth, device=device, seed=1) / depth**0.5, kind)
    bias = random(columns, dtype=dtype, device=device, seed=2) if biased else None
    expected = linear_quantized_torch(x.float(), *eight, None if bias is None else bias.float(), dynamic=True)
    with poisoned():
        plain, wide, terms = (product(x, *eight, bias, **how) for how in ({}, {"fp32_out": True}, {"split_k": True}))
    near(plain, expected)
    (close if kind == "int8" else near)(wide, expected)  # tensor cores do not add fp8 products in float32
    assert wide.dtype == torch.float32 and torch.equal(sum_split_k(terms, 2, dtype), plain)
    assert terms.ndim == (3 if depth >= 600 else 2)


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_triton_gated(rows: int, kind: Kind, dtype: torch.dtype, device: str) -> None:
    from worker.ops.activation.triton import act_and_mul_triton
    from worker.ops.linear.triton import gated_linear_triton

    x, bias = random(rows, 200, dtype=dtype, device=device), random(140, dtype=dtype, device=device, seed=2)
    values, scale = quantize(random(140, 200, device=device, seed=1) / 14, kind)
    with poisoned():
        got = gated_linear_triton(x, values, bias, "silu", scale, dynamic=True)
    near(got, act_and_mul(linear_quantized_torch(x.float(), values, scale, bias.float(), dynamic=True), "silu"))
    assert torch.equal(got, act_and_mul_triton(product(x, values, scale, bias), "silu"))


ALIKE = [
    (150, 130, 530),
    (150, 192, 200),
    pytest.param(1100, 3072, 8192, marks=pytest.mark.gpu),
    pytest.param(1100, 2560, 9728, marks=pytest.mark.gpu),
    pytest.param(1100, 16384, 3072, marks=pytest.mark.gpu),
]


# the dtype of activations matters where they are quantized and where a product is rounded, not in between
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("int8", torch.float32), ("fp8", torch.float16),
        *(pytest.param(kind, dtype, marks=pytest.mark.gpu)
          for kind, dtype in (("int8", torch.bfloat16), ("fp8", torch.bfloat16), ("fp8", torch.float32))),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("rows", "columns", "depth"), ALIKE)
def test_triton_bits_of_a_row_do_not_depend_on_the_others(
    rows: int, columns: int, depth: int, kind: Kind, dtype: torch.dtype, device: str
) -> None:
    """All tiles give the same bits, whether each chain along K has its own program or one program computes all."""
    x, eight = tokens(rows, depth, dtype, device), quantize(random(columns, depth, device=device, seed=1), kind)
    whole = product(x, *eight)
    for begin, end in ((0, 1), (10, 30), (60, 120), (0, 140), (0, rows // 2)):
        assert torch.equal(product(x[begin:end], *eight), whole[begin:end])
        assert torch.equal(sum_split_k(product(x[begin:end], *eight, split_k=True), 2, dtype), whole[begin:end])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 20, 64, 200, 2048])
@pytest.mark.parametrize(("columns", "depth"), [(5120, 3072), (3072, 8192), (2560, 9728), (16384, 3072)])
def test_real_shapes_are_right_in_bfloat16(columns: int, depth: int, rows: int, kind: Kind, device: str) -> None:
    """The products are near exact ones. Sums of int8 are exact; tensor cores keep only about 14 bits of sums of fp8."""
    x = tokens(rows, depth, torch.bfloat16, device)
    values, scale = quantize(random(columns, depth, device=device, seed=1) / depth**0.5, kind)
    token_values, token_scale = quantize_tokens(x, FORMATS[kind])
    exact = token_values.double() @ values.double().T * scale.double() * token_scale.double()[:, None]
    with poisoned():
        near(product(x, values, scale), exact)
        error = float((product(x, values, scale, fp32_out=True) - exact).norm() / exact.norm())
    assert error < (1e-6 if kind == "int8" else 2e-3)


@pytest.mark.gpu
def test_small_products_beside_a_large_one_are_not_lost_in_fp8(device: str) -> None:
    """The accumulator of a tensor core that holds 448 * 448 would lose terms below about 16."""
    x, weight = torch.full((1, 4096), 1.0, device=device), torch.full((64, 4096), 0.25, device=device)
    x[:, 0], weight[:, 0] = 448.0, 448.0
    got = product(x, weight.to(torch.float8_e4m3fn), torch.ones(64, device=device))
    assert bool((got - (448 * 448 + 0.25 * 4095)).abs().max() <= 0.25 * 128)
