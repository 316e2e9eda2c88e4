from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.worker.ops.harness.cases import TRITON_DTYPES, close, random
from worker.ops.activation import act_and_mul
from worker.ops.linear import linear
from worker.ops.linear.packed import PackedLinear, pack_quantized
from worker.ops.norm.reference import sum_split_k
from worker.ops.paged_kv import quantize_rows
from worker.ops.quantized_weight import (
    FORMATS,
    INT4,
    INT8,
    Kind,
    dequantize,
    linear_quantized_torch,
    quantize,
    quantize_groups,
    quantize_tokens,
)

KINDS: list[Kind] = ["int8", "fp8"]
# half a rounding step: int8 relative to the row's largest value, fp8 relative to the value
STEP = {"int8": 1 / 254, "fp8": 1 / 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_at_most_half_a_step_off(kind: Kind, dtype: torch.dtype) -> None:
    weight = (random(40, 200) * torch.logspace(-6, 6, 40)[:, None]).to(dtype)
    values, scale = quantize(weight, kind)
    assert values.dtype == FORMATS[kind] and values.shape == weight.shape and scale.shape == (40,)
    wide = weight.float()
    largest = wide.abs().amax(dim=1, keepdim=True)
    relative_to = largest if kind == "int8" else torch.maximum(wide.abs(), largest / 448 / 32)
    off = (dequantize(values, scale, torch.float32) - wide).abs()
    assert bool((off <= relative_to * STEP[kind] * 1.001).all())


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_uses_the_whole_range_and_zeros_stay(kind: Kind) -> None:
    weight = torch.tensor([[0.5, -1.0, 0.0], [0.0, 0.0, 0.0], [-3e-40, 0.0, 0.0], [6e4, 1.0, -6e4]])
    values, scale = quantize(weight, kind)
    assert values[0, 1].float() == -values[3, 0].float() == values[3, 2].float() == -(127 if kind == "int8" else 448)
    assert not values[1].float().any() and bool(torch.isfinite(dequantize(values, scale, torch.float32)).all())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_linear_equals_linear_with_the_dequantized_weight(kind: Kind, biased: bool) -> None:
    x, (values, scale) = random(5, 70), quantize(random(33, 70, seed=1), kind)
    bias = random(33, seed=2) if biased else None
    weight = dequantize(values, scale, torch.float64)
    expected = (x.double() @ weight.T + (bias.double() if bias is not None else 0)).float()
    close(linear(x, PackedLinear(values, bias, True, scale=scale)), expected)
    close(linear(x, pack_quantized(values, scale, bias, dtype=torch.float32, invariant=True)), expected)
    assert linear(x.half(), PackedLinear(values, bias, True, scale=scale)).dtype == torch.float16
    wide = linear(x.half(), PackedLinear(values, bias, True, scale=scale), fp32_out=True)
    assert wide.dtype == torch.float32


def product(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None, **how: bool) -> Tensor:
    from worker.ops.linear.triton import linear_triton

    return linear_triton(x, values, bias, scale, **how)


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "biased"),
    [
        (1, 48, 70, True),
        (5, 130, 600, True),  # two chains along K
        (20, 64, 1024, False),  # four equal chains
        (70, 40, 600, False),
    ],
)
def test_linear_with_quantized_weight_triton_agrees_with_torch(
    rows: int, columns: int, depth: int, biased: bool, kind: Kind, dtype: torch.dtype, device: str
) -> None:
    x = random(rows, depth, dtype=dtype, device=device)
    values, scale = quantize(random(columns, depth, device=device, seed=1) / depth**0.5, kind)
    bias = random(columns, dtype=dtype, device=device, seed=2) if biased else None
    expected = linear_quantized_torch(x, values, scale, bias)
    close(product(x, values, scale, bias), expected)
    terms = product(x, values, scale, bias, split_k=True)
    close(sum_split_k(terms, 2, dtype), expected)
    assert terms.ndim == (3 if depth >= 600 else 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 40])
def test_triton_gated(rows: int, kind: Kind, device: str) -> None:
    from worker.ops.linear.triton import gated_linear_triton

    x, bias = random(rows, 200, device=device), random(140, device=device, seed=2)
    values, scale = quantize(random(140, 200, device=device, seed=1) / 14, kind)
    expected = act_and_mul(linear_quantized_torch(x, values, scale, bias), "silu")
    close(gated_linear_triton(x, values, bias, "silu", scale), expected)


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_triton_reads_every_byte_exactly(kind: Kind, dtype: torch.dtype, device: str) -> None:
    every = torch.arange(256, dtype=torch.uint8, device=device)
    if kind == "fp8":
        every[every % 128 == 127] = 0  # codes that are NaN
    values = every.view(FORMATS[kind]).repeat(3, 1)  # [3, 256]
    ones = torch.eye(256, dtype=dtype, device=device)
    got = product(ones, values, torch.ones(3, device=device))
    assert torch.equal(got, values.float().to(dtype).T)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "depth"), [(3072, 8192), (16384, 1024)])
def test_triton_bits_of_a_row_do_not_depend_on_the_others(
    columns: int, depth: int, kind: Kind, dtype: torch.dtype, device: str
) -> None:
    """All tile shapes give the same bits, whichever program computes a chain. The test needs a real GPU."""
    x = random(1100, depth, dtype=dtype, device=device)
    values, scale = quantize(random(columns, depth, device=device, seed=1), kind)
    whole = product(x, values, scale)
    for begin, end in ((0, 1), (7, 24), (10, 42), (100, 164), (100, 165), (0, 700)):
        assert torch.equal(product(x[begin:end], values, scale), whole[begin:end])
        assert torch.equal(sum_split_k(product(x[begin:end], values, scale, split_k=True), 2, dtype), whole[begin:end])


class NoDivisionByNumbers(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket is not torch.ops.aten.div or isinstance(args[1], Tensor), func
        return func(*args, **(kwargs or {}))


def test_quantizing_never_divides_by_a_number() -> None:
    """On CUDA, PyTorch multiplies by the number's reciprocal instead, so the scales would differ from the CPU's."""
    with NoDivisionByNumbers():
        for kind in FORMATS:
            quantize(torch.ones(3, 4), kind)
            quantize_tokens(torch.ones(3, 4), FORMATS[kind])
        for code_map in (INT4, INT8):
            quantize_groups(torch.ones(3, 32), code_map, 16)
        for dtype in (torch.int8, torch.float8_e4m3fn):
            quantize_rows(torch.ones(3, 4), dtype)
    with NoDivisionByNumbers(), pytest.raises(AssertionError):
        torch.ones(3) / 448.0
