"""Weights in small integers: AMX tiles add exactly, so products have the bits of integer instructions."""

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.cpu_tiers import CAN_EMULATE, EMULATED, HERE, use
from worker.ops.linear import native as linear_native
from worker.ops.linear.native import INTEGER4, INTEGER8, TABLE4, pack_weight
from worker.ops.quantized_weight import E2M1, INT4, INT8, IQ1, IQ2, IQ3_S, IQ3_XXS, IQ4_NL, CodeMap, QuantizedWeight

pytestmark = pytest.mark.skipif(not CAN_EMULATE, reason="needs AVX-512 with bf16")
TILES = "amx" if "amx" in HERE else EMULATED
ROWS = 134  # four times 32 rows, whose sums tiles keep in places that alternate, and a rest
PARTS = ((0, 1), (3, 5), (0, 3), (4, 8), (1, 6), (2, 8), (0, 7), (3, 11), (0, 16), (2, 19), (0, 33), (9, 41), (0, 96))


def drawn(code_map: CodeMap, n: int, k: int, group: int, minimum: bool) -> QuantizedWeight:
    """Draws a random weight. All codes of its first rows have the largest magnitude."""
    count, groups = 1 << code_map.bits, -(-k // group)
    codes = torch.randint(count, (n, k), dtype=torch.uint8)
    codes[:3] = max(range(count), key=lambda code: abs(code_map.values[code]))
    offset = torch.rand(n, groups) * 0.1 if minimum else None
    return QuantizedWeight(codes, code_map, torch.rand(n, groups) * 0.01, offset, group)


def inputs(k: int) -> Tensor:
    """Returns rows of all magnitudes: two reach the largest integers, and some have values that are not finite."""
    x = torch.randn(ROWS, k) * torch.logspace(-6, 3, ROWS)[:, None]
    x[1], x[2] = 255.0, -255.0
    x[5, 3], x[9, 7], x[11] = float("inf"), float("nan"), 0.0
    return x.bfloat16()


def product(which: str, weight: QuantizedWeight, x: Tensor) -> tuple[Tensor, list[Tensor], int]:
    """Returns the product of all rows, the products of PARTS of the rows, and the kind of the packed weight."""
    with use(which):
        packed = pack_weight([weight], dtype=torch.bfloat16)
        whole, *parts = (
            linear_native.linear(rows, packed, out_dtype=torch.float32).view(torch.int32)
            for rows in (x, *(x[first:end].contiguous() for first, end in PARTS))
        )
    return whole, parts, packed.parts[0].kind


@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize(
    "code_map, group", [(INT4, 16), (INT4, 32), (INT4, 64), (E2M1, 16), (E2M1, 32), (IQ1, 32), (IQ3_S, 32)]
)
def test_tiles_give_the_bits_of_integers(code_map: CodeMap, group: int, minimum: bool) -> None:
    torch.manual_seed(group)
    for n, k in ((96, 256), (64, 160), (40, 48), (70, 1024), (33, 32)):
        if group == 64 and k < group:
            continue
        weight, x = drawn(code_map, n, k, group, minimum), inputs(k)
        integers, few_rows, _ = product("avx512bf16", weight, x)
        assert all(torch.equal(part, integers[a:b]) for part, (a, b) in zip(few_rows, PARTS, strict=True)), (n, k)
        tiles, parts, kind = product(TILES, weight, x)
        assert kind == INTEGER4 or k % 32, (n, k)
        if kind == INTEGER4:
            assert torch.equal(integers, tiles), (n, k)
        assert all(torch.equal(part, tiles[a:b]) for part, (a, b) in zip(parts, PARTS, strict=True)), (n, k)


@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("group", [16, 32])
def test_eight_bits_have_the_same_bits_in_tiles_and_in_few_rows(group: int, minimum: bool) -> None:
    """With AMX, inputs are rounded to fewer bits, so products differ from those of other instruction sets."""
    torch.manual_seed(group)
    for n, k in ((96, 256), (64, 160), (40, 48), (70, 1024), (33, 32)):
        weight, x = drawn(INT8, n, k, group, minimum), inputs(k)
        tiles, parts, kind = product(TILES, weight, x)
        assert kind == INTEGER8
        assert all(torch.equal(part, tiles[a:b]) for part, (a, b) in zip(parts, PARTS, strict=True)), (n, k)


@pytest.mark.parametrize(
    "code_map, group", [(INT4, 128), (INT4, 48), (IQ4_NL, 32), (E2M1, 64), (IQ2, 16), (IQ3_XXS, 32)]
)
def test_tiles_multiply_values_where_sums_might_be_rounded(code_map: CodeMap, group: int) -> None:
    weight, x = drawn(code_map, 64, 384, group, False), inputs(384)
    integers, few_rows, _ = product("avx512bf16", weight, x)
    assert all(torch.equal(part, integers[a:b]) for part, (a, b) in zip(few_rows, PARTS, strict=True))
    tiles, parts, kind = product(TILES, weight, x)
    assert kind == TABLE4
    assert all(torch.equal(part, tiles[a:b]) for part, (a, b) in zip(parts, PARTS, strict=True))
