"""Experts packed for a GPU hold the original weights."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.cases import random
from tests.worker.ops.harness.quantized import CODE_MAPS, quantized, with_scales
from worker.ops.linear.packed_codes import ROWS, unpack_codes
from worker.ops.moe.packed import pack_experts_on_gpu
from worker.ops.quantized_weight import INT4, INT8, NF4, CodeMap, QuantizedWeight

Parts = list[Tensor | QuantizedWeight]


def expert(number: int, code_map: CodeMap = INT4, group_size: int = 32, *, minimum: bool = False) -> QuantizedWeight:
    one = quantized(code_map, 70, 200, group_size, minimum=minimum)
    return replace(one, scale=one.scale + number)


@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("code_map", CODE_MAPS, ids=lambda code_map: code_map.name)
def test_codes_of_all_experts_are_one_weight(code_map: CodeMap, minimum: bool, device: str) -> None:
    for group_size in (16, 128, 1000):
        given = [expert(number, code_map, group_size, minimum=minimum) for number in range(3)]
        weight, codes = pack_experts_on_gpu([[one] for one in given], 3, torch.float16)
        assert codes is not None and not weight.numel() and weight.dtype == torch.float16
        assert codes.packed.padded_rows == 3 * 2 * ROWS and codes.rows == 70
        for number, one in enumerate(given):
            found = unpack_codes(codes.expert(number))
            assert torch.equal(found.dequantize(torch.float32), one.dequantize(torch.float32))


def test_parts_in_one_format_are_stacked() -> None:
    given: list[Parts] = [[expert(0), expert(1)], [expert(2), expert(3)]]
    _, codes = pack_experts_on_gpu(given, 2, torch.float16)
    assert codes is not None and codes.rows == 140
    expected = torch.cat([expert(number).dequantize(torch.float32) for number in (2, 3)])
    assert torch.equal(unpack_codes(codes.expert(1)).dequantize(torch.float32), expected)


def test_scales_are_as_narrow_as_those_of_all_experts_allow() -> None:
    narrow, wide = (with_scales(expert(0), dtype) for dtype in (torch.bfloat16, torch.float32))
    for given, expected in (([narrow, narrow], torch.bfloat16), ([narrow, wide], None)):
        _, codes = pack_experts_on_gpu([[one] for one in given], 2, torch.float16)
        assert codes is not None and codes.packed.narrow == expected


ordered = replace(expert(0), input_order=torch.arange(200).flip(0))
MIXED: dict[str, list[Parts]] = {
    "plain": [[random(70, 200, dtype=torch.float16, seed=seed)] for seed in (0, 1)],
    "another group size": [[expert(0)], [expert(1)], [expert(2, group_size=64)]],
    "another code map": [[expert(0)], [expert(1, NF4)]],
    "a minimum": [[expert(0)], [expert(1, minimum=True)]],
    "two parts": [[expert(0), expert(1, INT8)], [expert(2), expert(3, INT8)]],
    "an input order": [[ordered], [ordered]],
    "one is plain": [[expert(0)], [random(70, 200, dtype=torch.float16)], [expert(1)]],
}


@pytest.mark.parametrize("experts", MIXED.values(), ids=MIXED)
def test_experts_in_several_formats_are_dequantized(experts: list[Parts]) -> None:
    def one_by_one() -> Iterator[Parts]:
        yield from experts

    weight, codes = pack_experts_on_gpu(one_by_one(), len(experts), torch.float16)
    assert codes is None and weight.dtype == torch.float16
    for number, parts in enumerate(experts):
        full = [part.dequantize(torch.float16) if isinstance(part, QuantizedWeight) else part for part in parts]
        assert torch.equal(weight[number], torch.cat(full))
