"""A rank has some rows of a weight: its products have the bits that the whole weight gives in these columns."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.worker.ops.harness.cases import TRITON_DTYPES, poisoned, random
from tests.worker.ops.harness.quantized import quantized
from worker.ops.linear import triton_tiles as tiles
from worker.ops.linear.cublas import cublas_linear
from worker.ops.linear.packed_codes import pack_codes
from worker.ops.quantized_weight import INT4

ROWS, DEPTH = 1024, 512
HALVES = slice(0, ROWS // 2), slice(ROWS // 2, ROWS)


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a GPU with so few, half of the rows has two chains of additions and all rows have one, as large weights do."""
    chosen = tiles.chain_length, tiles.choose_tile, tiles.choose_gated_tile
    monkeypatch.setattr(tiles, "NUM_SMS", 4)
    for one in chosen:
        one.cache_clear()
    assert tiles.chain_length(ROWS, DEPTH) >= DEPTH > tiles.chain_length(ROWS // 2, DEPTH)
    yield
    for one in chosen:
        one.cache_clear()


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
def test_rows_of_a_plain_weight(dtype: torch.dtype, device: str) -> None:
    from worker.ops.linear.triton import linear_triton

    x, weight = random(3, DEPTH, dtype=dtype, device=device), random(ROWS, DEPTH, dtype=dtype, device=device, seed=1)
    bias = random(ROWS, dtype=dtype, device=device, seed=2)
    with poisoned():
        whole = linear_triton(x, weight, bias, fp32_out=True)
        for half in HALVES:
            own = linear_triton(x, weight[half], bias[half], fp32_out=True, whole_rows=ROWS)
            assert torch.equal(own, whole[:, half])
    alone = linear_triton(x, weight[HALVES[0]], bias[HALVES[0]], fp32_out=True)
    assert not torch.equal(alone, whole[:, HALVES[0]]), "rows that are a weight of their own have other chains"


def test_rows_of_a_weight_in_few_bits(device: str) -> None:
    from worker.ops.linear.triton_low_bit import quantized_linear_triton

    x, weight = random(3, DEPTH, dtype=torch.float16, device=device), quantized(INT4, ROWS, DEPTH, 64)
    weight = replace(weight, codes=weight.codes.to(device), scale=weight.scale.to(device))
    whole = quantized_linear_triton(x, [pack_codes(weight)], None, fp32_out=True)
    for half in HALVES:
        own = [pack_codes(weight.rows(half))]
        assert torch.equal(quantized_linear_triton(x, own, None, fp32_out=True, whole_rows=ROWS), whole[:, half])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_rows_of_gate_and_up(device: str) -> None:
    from worker.ops.linear.triton import gated_linear_triton

    x, inner = random(2, DEPTH, device=device), ROWS // 2
    weight = random(ROWS, DEPTH, device=device, seed=1) / 8
    whole = gated_linear_triton(x, weight, None, "silu")
    own = torch.cat((weight[: inner // 2], weight[inner : inner + inner // 2]))
    assert torch.equal(gated_linear_triton(x, own, None, "silu", whole_rows=ROWS), whole[:, : inner // 2])


def test_rows_of_a_product_by_the_library() -> None:
    x, weight = random(3, DEPTH), random(ROWS, DEPTH, seed=1)
    assert cublas_linear(x, weight[HALVES[0]], None, split_k=True).shape == (2, 3, ROWS // 2)
    assert cublas_linear(x, weight[HALVES[0]], None, split_k=True, whole_rows=ROWS).shape == (3, ROWS // 2)
