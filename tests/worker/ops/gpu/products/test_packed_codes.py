from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.quantized import CODE_MAPS, quantized, with_scales
from worker.ops.linear.packed_codes import ROWS, STEP, WHOLE_ROW, pack_codes, unpack_codes
from worker.ops.quantized_weight import E4M3, INT4, INT8, CodeMap


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("group_size", [16, 32, 48, 64, 80, 96, 128, 160, 256, 384, 1000])
def test_packing_keeps_every_number(group_size: int, minimum: bool, dtype: torch.dtype) -> None:
    for code_map in CODE_MAPS:
        weight = with_scales(quantized(code_map, 70, 400, group_size, minimum=minimum), dtype)
        packed = pack_codes(weight)
        assert packed.narrow == (None if dtype == torch.float32 else dtype)
        assert torch.equal(unpack_codes(packed).dequantize(torch.float32), weight.dequantize(torch.float32))


@pytest.mark.parametrize(
    ("group_size", "packed"),
    [(16, 16), (32, 32), (48, 16), (64, 64), (96, 32), (128, 128), (160, 32), (384, 384), (400, WHOLE_ROW)],
)
def test_groups_are_the_largest_that_kernels_read(group_size: int, packed: int) -> None:
    assert pack_codes(quantized(INT4, 6, 400, group_size, minimum=False)).group_size == packed


@pytest.mark.parametrize("code_map", [INT4, INT8], ids=lambda code_map: code_map.name)
def test_a_part_of_the_words_holds_the_codes_of_consecutive_inputs(code_map: CodeMap) -> None:
    weight = quantized(code_map, 2 * ROWS, 2 * STEP, 32, minimum=False)
    packed, parts = pack_codes(weight), 16 // code_map.bits
    for tile, step, block, part in [(0, 0, 0, 0), (1, 1, 0, 1), (1, 0, packed.codes.shape[2] - 1, parts - 1)]:
        first = step * STEP + (block * parts + part) * packed.part_inputs
        expected = weight.codes[tile * ROWS : (tile + 1) * ROWS, first : first + packed.part_inputs]
        mask = (1 << code_map.bits) - 1
        assert torch.equal(packed.codes[tile, step, block].int() >> part * code_map.bits & mask, expected.int())


@pytest.mark.parametrize(
    ("group_size", "minimum", "narrow", "bits"),
    [
        (128, False, torch.bfloat16, 4.25), (32, False, torch.float16, 4.5), (32, True, torch.float16, 5.0),
        (32, True, None, 6.0), (128, True, None, 4.5), (64, False, torch.bfloat16, 4.25),
    ],
)  # fmt: skip
def test_memory_of_a_weight(group_size: int, minimum: bool, narrow: torch.dtype | None, bits: float) -> None:
    weight = quantized(INT4, 4 * ROWS, 8 * STEP, group_size, minimum=minimum)
    packed = pack_codes(with_scales(weight, narrow or torch.float32))
    assert packed.nbytes() - packed.table.nbytes == bits / 8 * weight.codes.numel()
    per_step = packed.scale_bytes_in_step()
    assert per_step * weight.codes.numel() // STEP == packed.nbytes() - packed.table.nbytes - packed.codes.nbytes


def test_scales_beyond_16_bits_stay_float32() -> None:
    half, weight = (with_scales(quantized(INT4, minimum=True), dtype) for dtype in (torch.float16, torch.float32))
    assert pack_codes(replace(half, minimum=weight.minimum)).narrow is None
    huge: Tensor = torch.full_like(half.scale, 2.0**20)  # beyond float16
    assert pack_codes(replace(half, scale=huge, minimum=None)).narrow == torch.bfloat16


def test_nan_of_e4m3_becomes_zero() -> None:
    weight = quantized(E4M3, 1, 256, 256, minimum=False)
    codes = torch.arange(256, dtype=torch.uint8)[None]
    assert unpack_codes(pack_codes(replace(weight, codes=codes))).codes[0, [0x7E, 0x7F, 0xFF]].tolist() == [0x7E, 0, 0]
