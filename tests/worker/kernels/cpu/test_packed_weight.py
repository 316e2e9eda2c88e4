"""Products with packed weights in few bits: the same bits as products with the dequantized weight, on every tier."""

import pytest
import torch
from torch import Tensor

from tests.worker.kernels.harness.cases import random
from tests.worker.kernels.harness.quantized import CODE_MAPS, quantized
from worker.kernels.cpu import bindings
from worker.kernels.cpu.library import multiplies_bf16
from worker.kernels.cpu.packed_weight import pack_weight
from worker.kernels.quantized_weight import E4M3, INT4, INT8, CodeMap, QuantizedWeight

SHAPES = [(32, 64), (70, 336), (40, 1040), (96, 2176)]


def product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiplies by the dequantized weight, in the number format in which this processor multiplies."""
    multiplied = x.dtype if x.dtype == torch.float32 or multiplies_bf16() else torch.float32
    full = pack_weight([weight.dequantize(multiplied)], bias, dtype=multiplied)
    return bindings.linear(x.to(multiplied), full, out_dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("code_map", CODE_MAPS, ids=lambda code_map: code_map.name)
def test_product_has_the_bits_of_the_dequantized_weight(code_map: CodeMap, n: int, k: int, dtype: torch.dtype) -> None:
    for group_size in (16, 32, 128, k):
        weight = quantized(code_map, n, k, group_size)
        packed, x = pack_weight([weight], dtype=dtype), random(70, k, dtype=dtype)
        expected = product(x, weight)
        for rows in (1, 2, 3, 5, 16, 17, 33, 70):
            assert torch.equal(bindings.linear(x[:rows], packed, out_dtype=torch.float32), expected[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code_map", [c for c in CODE_MAPS if c is not E4M3], ids=lambda code_map: code_map.name)
def test_product_with_minimums_is_that_of_the_dequantized_weight(code_map: CodeMap, dtype: torch.dtype) -> None:
    weight = quantized(code_map, 70, 336, 32, minimum=True)
    packed, x = pack_weight([weight], dtype=dtype), random(40, 336, dtype=dtype)
    expected = x.double() @ weight.dequantize(torch.float32).double().T
    whole = bindings.linear(x, packed, out_dtype=torch.float32)
    assert ((whole - expected).norm() / expected.norm()).item() < (1e-6 if dtype == torch.float32 else 3e-3)
    for rows in (1, 3, 7, 20):
        assert torch.equal(bindings.linear(x[:rows], packed, out_dtype=torch.float32), whole[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_in_several_formats_give_neighbouring_columns(dtype: torch.dtype) -> None:
    plain, bias = random(40, 272, dtype=dtype), random(206, dtype=dtype)
    parts = [quantized(INT4, 70, 272, 32), plain, quantized(INT8, 96, 272, 272)]
    packed = pack_weight(parts, bias, dtype=dtype)
    x = random(45, 272, dtype=dtype)
    for rows in (1, 45):
        whole, begin = bindings.linear(x[:rows], packed), 0
        for part in parts:
            end = begin + part.shape[0]
            alone = bindings.linear(x[:rows], pack_weight([part], bias[begin:end], dtype=dtype))
            assert torch.equal(whole[:, begin:end], alone)
            begin = end
        assert begin == packed.n == whole.shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_taken_in_the_order_of_the_codes(dtype: torch.dtype) -> None:
    weight = quantized(INT4, 64, 160, 32)
    order = torch.randperm(160, generator=torch.Generator().manual_seed(3))
    ordered = QuantizedWeight(weight.codes, INT4, weight.scale, None, 32, order)
    x = random(9, 160, dtype=dtype)
    ours = bindings.linear(x, pack_weight([ordered], dtype=dtype))
    assert torch.equal(ours, bindings.linear(x[:, order].contiguous(), pack_weight([weight], dtype=dtype)))
    assert torch.equal(ordered.dequantize(dtype)[:, order], weight.dequantize(dtype))


def test_tiny_and_huge_scales_survive_sixteen_bits() -> None:
    for exponent in (-60, 60):
        weight = quantized(INT4, 32, 64, 32)
        scaled = QuantizedWeight(weight.codes, INT4, weight.scale * 2.0**exponent, None, 32)
        x = random(3, 64, dtype=torch.bfloat16)
        ours = bindings.linear(x, pack_weight([scaled], dtype=torch.bfloat16), out_dtype=torch.float32)
        plain = bindings.linear(x, pack_weight([weight], dtype=torch.bfloat16), out_dtype=torch.float32)
        assert torch.equal(ours, plain * 2.0**exponent)
