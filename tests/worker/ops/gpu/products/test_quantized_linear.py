"""Products with weights of a few bits have the bits of products with the dequantized weights."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.cases import TRITON_DTYPES, near, poisoned, random
from tests.worker.ops.harness.quantized import CODE_MAPS, quantized, with_scales
from worker.ops.linear.packed import PackedLinear
from worker.ops.linear.packed_codes import PackedCodes, pack_codes
from worker.ops.linear.reference import linear_torch
from worker.ops.norm.reference import sum_split_k
from worker.ops.quantized_weight import E2M1, INT4, INT8, CodeMap, QuantizedWeight, stack

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]
SCALES = [torch.float32, torch.bfloat16, torch.float16]


def on(weight: QuantizedWeight, device: str) -> QuantizedWeight:
    minimum = None if weight.minimum is None else weight.minimum.to(device)
    return replace(weight, codes=weight.codes.to(device), scale=weight.scale.to(device), minimum=minimum)


def of_shape(columns: int, depth: int, device: str, *, group_size: int = 32) -> QuantizedWeight:
    return on(quantized(INT4, columns, depth, group_size, minimum=True), device)


def same_bits(x: Tensor, weight: QuantizedWeight) -> None:
    from worker.ops.linear.triton import linear_triton
    from worker.ops.linear.triton_low_bit import quantized_linear_triton

    with poisoned():
        found = quantized_linear_triton(x, [pack_codes(weight)], None)
    assert torch.equal(found, linear_triton(x, weight.dequantize(x.dtype), None))


@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("code_map", CODE_MAPS, ids=lambda code_map: code_map.name)
def test_every_format_has_the_bits_of_its_dequantized_weight(code_map: CodeMap, minimum: bool, device: str) -> None:
    """Tests every group size with one dtype of scales and one of inputs; all code maps together cover all pairs."""
    dtypes = [torch.float16, torch.float32] if device == "cpu" else [torch.float16, torch.bfloat16]
    first = CODE_MAPS.index(code_map) + minimum
    for at, group_size in enumerate((16, 32, 64, 96, 128, 256, 1000), first):
        weight = with_scales(quantized(code_map, 40, 280, group_size, minimum=minimum), SCALES[at % 3])
        same_bits(random(3, 280, dtype=dtypes[at // 3 % 2], device=device), on(weight, device))


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [
    (1, 64, 128), (16, 130, 200), (20, 128, 256), (33, 300, 72), (64, 64, 640), (70, 129, 128), (130, 128, 130),
    (300, 128, 128),
    *(pytest.param(rows, 3072, 8192, marks=pytest.mark.gpu) for rows in (1, 20, 64, 130, 700)),
    *(pytest.param(rows, 16384, 3072, marks=pytest.mark.gpu) for rows in (1, 1100)),
])  # fmt: skip
def test_every_tile_has_the_bits_of_the_dequantized_weight(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: str
) -> None:
    x = random(rows, 3 * depth, dtype=dtype, device=device)[:, depth : 2 * depth]  # strided
    same_bits(x, of_shape(columns, depth, device))


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
def test_chains_bias_and_float32_have_the_bits_of_the_dequantized_weight(dtype: torch.dtype, device: str) -> None:
    from worker.ops.linear.triton import linear_triton
    from worker.ops.linear.triton_low_bit import quantized_linear_triton

    weight, bias = of_shape(72, 700, device, group_size=128), random(72, dtype=dtype, device=device, seed=2)
    full, packed = weight.dequantize(dtype), [pack_codes(weight)]
    partial, wide = (False, True), (True, False)
    for rows, added, (fp32_out, split_k) in (
        (3, bias, partial),
        (70, None, partial),
        (3, None, wide),
        (70, bias, wide),
    ):
        x = random(rows, 700, dtype=dtype, device=device)
        with poisoned():
            found = quantized_linear_triton(x, packed, added, fp32_out=fp32_out, split_k=split_k)
        expected = linear_triton(x, full, added, fp32_out=fp32_out, split_k=split_k)
        assert found.ndim == 3 if split_k else found.ndim == 2
        assert found.dtype == expected.dtype and torch.equal(found, expected)
        if split_k:
            whole = quantized_linear_triton(x, packed, added)
            assert torch.equal(sum_split_k(found, 2, dtype), whole)


def mixed(device: str, columns: int = 40) -> list[QuantizedWeight]:
    """Returns a weight as in GGUF files of type Q4_K_M: queries and keys in four bits, values in more bits."""
    parts = quantized(INT4, columns, 600, 32, minimum=True), quantized(INT8, columns // 2, 600, 16)
    return [on(part, device) for part in (*parts, quantized(E2M1, 70, 600, 32))]


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("rows", [2, 70])
def test_parts_in_several_formats_are_one_product(rows: int, dtype: torch.dtype, device: str) -> None:
    from worker.ops.linear.triton import linear_triton
    from worker.ops.linear.triton_low_bit import quantized_linear_triton

    parts = mixed(device)
    full, x = torch.cat([part.dequantize(dtype) for part in parts]), random(rows, 600, dtype=dtype, device=device)
    bias = random(len(full), dtype=dtype, device=device, seed=3)
    for split_k in (False, True):
        with poisoned():
            found = quantized_linear_triton(x, [pack_codes(part) for part in parts], bias, split_k=split_k)
        assert torch.equal(found, linear_triton(x, full, bias, split_k=split_k))


@pytest.mark.parametrize("rows", [2, 70])
def test_parts_take_inputs_in_orders_of_their_own(rows: int, device: str) -> None:
    ordered = in_own_orders(mixed(device))
    x, full = random(rows, 600, dtype=torch.float16, device=device), [one.dequantize(torch.float32) for one in ordered]
    exact = x.double() @ torch.cat(full).double().T
    near(quantized_linear(x, ordered), exact)


def test_gate_and_up_in_orders_of_their_own_are_two_parts(device: str) -> None:
    from worker.ops.linear.triton_low_bit import can_be_gated

    parts = in_own_orders([of_shape(128, 200, device)] * 2)
    assert not can_be_gated([pack_codes(one) for one in stack(parts)])


def in_own_orders(parts: list[QuantizedWeight]) -> list[QuantizedWeight]:
    made = torch.Generator().manual_seed(4)
    return [
        replace(one, input_order=torch.randperm(one.shape[1], generator=made).to(one.codes.device)) for one in parts
    ]


def quantized_linear(x: Tensor, parts: list[QuantizedWeight]) -> Tensor:
    from worker.ops.linear.triton_low_bit import quantized_linear_triton

    return quantized_linear_triton(x, [pack_codes(one) for one in stack(parts)], None)


def test_an_input_order_is_that_of_the_tokens(device: str) -> None:
    from worker.ops.linear.triton_low_bit import quantized_gated_linear_triton, quantized_linear_triton

    plain = of_shape(128, 200, device)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(3)).to(device)
    ordered, x = replace(plain, input_order=order), random(5, 200, dtype=torch.float16, device=device)
    found = quantized_linear_triton(x, [pack_codes(ordered)], None)
    assert torch.equal(found, quantized_linear_triton(x[:, order], [pack_codes(plain)], None))
    gated = quantized_gated_linear_triton(x, pack_codes(ordered), None, "silu")
    assert torch.equal(gated, quantized_gated_linear_triton(x[:, order], pack_codes(plain), None, "silu"))
    exact = x.double() @ ordered.dequantize(torch.float32).double().T
    assert float((found.double() - exact).norm() / exact.norm()) < 1e-3


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [
    (3, 64, 200), (40, 192, 128), (70, 128, 256),
    *(pytest.param(rows, 9728, 2560, marks=pytest.mark.gpu) for rows in (1, 40, 700)),
])  # fmt: skip
def test_a_gated_product_has_the_bits_of_the_product_and_the_gate(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: str
) -> None:
    from worker.ops.activation.triton import act_and_mul_triton
    from worker.ops.linear.triton_low_bit import can_be_gated, quantized_gated_linear_triton, quantized_linear_triton

    weight = pack_codes(on(quantized(INT4, 2 * columns, depth, 64), device))
    x, bias = random(rows, depth, dtype=dtype, device=device), random(2 * columns, dtype=dtype, device=device, seed=4)
    assert can_be_gated([weight])
    for activation, added in (("silu", None), ("gelu_tanh", bias)):
        with poisoned():
            found = quantized_gated_linear_triton(x, weight, added, activation)
        assert torch.equal(found, act_and_mul_triton(quantized_linear_triton(x, [weight], added), activation))


def test_gates_of_several_formats_chains_or_odd_sizes_have_no_kernel_of_their_own(device: str) -> None:
    from worker.ops.linear.triton_low_bit import can_be_gated

    def packed(columns: int, depth: int) -> PackedCodes:
        return pack_codes(of_shape(columns, depth, device))

    assert can_be_gated([packed(128, 256)])
    assert not can_be_gated([packed(128, 256)] * 2)
    assert not can_be_gated([packed(128, 700)])
    assert not can_be_gated([packed(144, 256)])


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
def test_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype, device: str) -> None:
    from worker.ops.linear.triton_low_bit import quantized_linear_triton

    weight, x = pack_codes(of_shape(70, 530, device)), random(150, 530, dtype=dtype, device=device)
    whole = quantized_linear_triton(x, [weight], None)
    for begin, end in ((0, 1), (10, 30), (60, 120)):
        part = quantized_linear_triton(x[begin:end], [weight], None, split_k=True)
        assert torch.equal(sum_split_k(part, 2, dtype), whole[begin:end])


def test_plain_pytorch_multiplies_packed_codes(device: str) -> None:
    parts, x = mixed(device), random(3, 600, device=device)
    packed = PackedLinear(torch.empty(0, device=device), None, True, codes=tuple(map(pack_codes, parts)))
    exact = x.double() @ torch.cat([part.dequantize(torch.float32) for part in parts]).double().T
    assert float((linear_torch(x, packed).double() - exact).norm() / exact.norm()) < 1e-5
