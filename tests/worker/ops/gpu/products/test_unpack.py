"""Codes become the numbers that the products of a quantized weight multiply."""

import pytest
import torch

from tests.worker.ops.gpu.products.test_quantized_linear import SCALES, on
from tests.worker.ops.harness.cases import poisoned
from tests.worker.ops.harness.quantized import CODE_MAPS, quantized, with_scales
from worker.ops.linear.packed_codes import pack_codes
from worker.ops.quantized_weight import CodeMap


@pytest.mark.parametrize("code_map", CODE_MAPS, ids=lambda code_map: code_map.name)
def test_unpacked_numbers_are_the_dequantized_ones(code_map: CodeMap, device: str) -> None:
    from worker.ops.linear.triton_unpack import unpack_triton

    first = CODE_MAPS.index(code_map)
    for at, group_size in enumerate((16, 32, 128, 1000), first):
        weight = with_scales(quantized(code_map, 70, 200, group_size, minimum=bool(at % 2)), SCALES[at % 3])
        parts = [on(weight, device), on(quantized(code_map, 6, 200, 64), device)]
        for dtype in (torch.float16, torch.bfloat16) if device != "cpu" else (torch.float16,):
            with poisoned():
                found = unpack_triton([pack_codes(part) for part in parts], dtype)
            assert torch.equal(found, torch.cat([part.dequantize(dtype) for part in parts]))
