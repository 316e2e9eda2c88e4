from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.cases import close, near, random
from tests.worker.ops.harness.quantized import quantized
from worker.model_runner.check_bits import with_cublas
from worker.operations import TORCH
from worker.ops.linear.cublas import (
    FEWEST_ROWS,
    FEWEST_ROWS_OF_CODES,
    Product,
    can_use_cublas,
    cublas_linear,
    product_of,
)
from worker.ops.linear.packed import PackedLinear
from worker.ops.linear.packed_codes import pack_codes
from worker.ops.linear.reference import linear_torch
from worker.ops.linear.triton_tiles import chain_length
from worker.ops.norm.reference import sum_split_k
from worker.ops.quantized_weight import INT4, QuantizedWeight


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(40, 800), (40, 200)])
def test_library_linear_adds_the_chains_in_order(columns: int, depth: int, biased: bool) -> None:
    x, weight = random(5, depth), random(columns, depth, seed=1)
    bias = random(columns, seed=2) if biased else None
    expected = linear_torch(x, PackedLinear(weight, bias, True))
    close(cublas_linear(x, weight, bias), expected)
    close(cublas_linear(x, weight, bias, fp32_out=True), expected)
    terms, chains = cublas_linear(x, weight, bias, split_k=True), -(-depth // chain_length(columns, depth))
    assert terms.shape == ((chains, 5, columns) if chains > 1 else (5, columns))
    assert torch.equal(sum_split_k(terms, 2, torch.float32), cublas_linear(x, weight, bias))


def test_library_computes_only_the_products_that_were_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ours(x: Tensor, packed: PackedLinear, **how: Any) -> Tensor:
        asked.append(len(x))
        return linear_torch(x, packed, **how)

    packed, x = PackedLinear(random(8, 16), None, True), random(3 * FEWEST_ROWS, 16)
    equal = frozenset({Product(8, 16, FEWEST_ROWS), Product(8, 16, 3)})
    linear = with_cublas(TORCH, equal).linear.func  # type: ignore[attr-defined]
    for rows in (3, FEWEST_ROWS, FEWEST_ROWS + 1, 2 * FEWEST_ROWS):
        close(linear(ours, equal, x[:rows], packed), linear_torch(x[:rows], packed))
    assert asked == [3, FEWEST_ROWS + 1, 2 * FEWEST_ROWS]
    operations = with_cublas(TORCH, equal)
    gated = operations.gated_linear(x[:FEWEST_ROWS], packed, "silu")
    close(gated, TORCH.gated_linear(x[:FEWEST_ROWS], packed, "silu"))
    assert with_cublas(TORCH, frozenset()) is TORCH


def test_library_is_for_plain_weights_that_are_to_be_invariant() -> None:
    weight = random(8, 16)
    assert can_use_cublas(PackedLinear(weight, None, True)) and not can_use_cublas(PackedLinear(weight, None, False))
    assert not can_use_cublas(PackedLinear(weight.to(torch.int8), None, True, scale=torch.ones(8)))


def of_codes(weight: QuantizedWeight) -> PackedLinear:
    return PackedLinear(torch.empty(0, dtype=torch.float16), None, True, codes=(pack_codes(weight),))


def test_library_multiplies_by_codes_of_many_rows_that_are_in_order() -> None:
    weight, asked = quantized(INT4, 40, 200), list[int]()
    packed = of_codes(weight)
    assert not can_use_cublas(of_codes(replace(weight, input_order=torch.arange(200))))
    x = random(FEWEST_ROWS_OF_CODES, 200, dtype=torch.float16)
    equal = frozenset(product_of(x[:rows], packed) for rows in (FEWEST_ROWS, FEWEST_ROWS_OF_CODES))

    def ours(x: Tensor, packed: PackedLinear, **how: Any) -> Tensor:
        asked.append(len(x))
        return x[:, :40]

    linear = with_cublas(TORCH, equal).linear.func  # type: ignore[attr-defined]
    expected = linear_torch(x, PackedLinear(weight.dequantize(torch.float16), None, True))
    near(linear(ours, equal, x, packed), expected)
    linear(ours, equal, x[:FEWEST_ROWS], packed)
    linear(ours, equal, x, of_codes(quantized(INT4, 40, 200, 64)))
    assert asked == [FEWEST_ROWS, FEWEST_ROWS_OF_CODES], "fewer rows, and another format"
