from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.kernels.harness.cases import close, random
from worker.kernels.gpu.products.tiles import chain_length
from worker.kernels.library_products import FEWEST_ROWS, Product, can_be_library, library_linear, with_library
from worker.kernels.linear import PackedLinear, linear_torch
from worker.kernels.operations import TORCH
from worker.kernels.split_k import sum_split_k


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(40, 800), (40, 200)])
def test_library_linear_adds_the_chains_in_order(columns: int, depth: int, biased: bool) -> None:
    x, weight = random(5, depth), random(columns, depth, seed=1)
    bias = random(columns, seed=2) if biased else None
    expected = linear_torch(x, PackedLinear(weight, bias, True))
    close(library_linear(x, weight, bias), expected)
    close(library_linear(x, weight, bias, fp32_out=True), expected)
    terms, chains = library_linear(x, weight, bias, split_k=True), -(-depth // chain_length(columns, depth))
    assert terms.shape == ((chains, 5, columns) if chains > 1 else (5, columns))
    assert torch.equal(sum_split_k(terms, 2, torch.float32), library_linear(x, weight, bias))


def test_library_computes_only_the_products_that_were_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ours(x: Tensor, packed: PackedLinear, **how: Any) -> Tensor:
        asked.append(len(x))
        return linear_torch(x, packed, **how)

    packed, x = PackedLinear(random(8, 16), None, True), random(3 * FEWEST_ROWS, 16)
    equal = frozenset({Product(8, 16, FEWEST_ROWS), Product(8, 16, 3)})
    linear = with_library(TORCH, equal).linear.func  # type: ignore[attr-defined]
    for rows in (3, FEWEST_ROWS, FEWEST_ROWS + 1, 2 * FEWEST_ROWS):
        close(linear(ours, equal, x[:rows], packed), linear_torch(x[:rows], packed))
    assert asked == [3, FEWEST_ROWS + 1, 2 * FEWEST_ROWS]
    operations = with_library(TORCH, equal)
    gated = operations.gated_linear(x[:FEWEST_ROWS], packed, "silu")
    close(gated, TORCH.gated_linear(x[:FEWEST_ROWS], packed, "silu"))
    assert with_library(TORCH, frozenset()) is TORCH


def test_library_is_for_plain_weights_that_are_to_be_invariant() -> None:
    weight = random(8, 16)
    assert can_be_library(PackedLinear(weight, None, True)) and not can_be_library(PackedLinear(weight, None, False))
    assert not can_be_library(PackedLinear(weight.to(torch.int8), None, True, scale=torch.ones(8)))
