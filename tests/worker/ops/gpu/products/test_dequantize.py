"""The assembly programs that dequantize weights are right.

A small evaluator runs them, because Triton's interpreter cannot."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.ptx import run
from tests.worker.ops.harness.quantized import CODE_MAPS
from worker.ops.linear.packed_codes import pack_codes
from worker.ops.linear.triton_dequantize import Format
from worker.ops.quantized_weight import E4M3, CodeMap, QuantizedWeight

PAIRS = 4096
TABLES = ("nf4", "iq4_nl", "iq1", "iq2", "iq3_xxs", "iq3_s")  # values that are looked up, and multiplied in float32


def weight_of(code_map: CodeMap, scale: Tensor, *, minimum: bool) -> QuantizedWeight:
    codes = torch.zeros(len(scale), 16, dtype=torch.uint8)
    return QuantizedWeight(codes, code_map, scale[:, None], scale[:, None] / 3 if minimum else None, 16)


def computed(given: Format, words: Tensor, scale: Tensor, minimum: Tensor, part: int, table: Tensor) -> Tensor:
    """Returns the weights [PAIRS, 2] that the program computes for words [PAIRS, 2], with a scale for each pair."""
    pairs, operands = words.to(torch.uint16).numpy().view(np.uint32)[:, 0], given.operands.split(",")
    factors = torch.stack((scale, scale), dim=1).bfloat16().view(torch.int32)[:, 0] if given.exact else scale
    values = [pairs, *(one.numpy().view(np.uint32) for one in (factors, factors, minimum, minimum))]
    values = values if given.has_minimum else values[:3]
    values += [np.zeros(1, np.uint32)] * operands.count("l")
    assert len(values) == len(operands) - 1
    found = run(given.programs[part], {f"${i}": value for i, value in enumerate(values, 1)}, table.numpy())
    return torch.from_numpy(found.view(np.uint16).reshape(-1, 2).copy())


@pytest.mark.parametrize("tokens", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("scales", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("code_map", CODE_MAPS, ids=lambda code_map: code_map.name)
def test_programs_compute_the_numbers_of_the_definition(
    code_map: CodeMap, scales: str, minimum: bool, tokens: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(len(scales))
    scale = torch.randn(PAIRS, generator=generator) * torch.logspace(-10, 1, PAIRS)
    scale = scale.to(getattr(torch, scales)).float()
    quantized = weight_of(code_map, scale, minimum=minimum)
    given = Format.of(pack_codes(quantized), tokens)
    assert given.exact == (
        tokens == torch.bfloat16 and scales == "bfloat16" and not minimum and code_map.name not in TABLES
    )
    words = torch.randint(0, 1 << 16, (PAIRS, 2), generator=generator)
    table = torch.tensor(code_map.values)
    for part in range(16 // code_map.bits):
        codes = words >> part * code_map.bits & (1 << code_map.bits) - 1
        if code_map == E4M3:  # pack_codes leaves no NaN
            words = torch.where(codes & 0x7F == 0x7F, words & ~(0xFF << 8 * part), words)
            codes = words >> 8 * part & 0xFF
        expected = table[codes] * scale[:, None]
        if quantized.minimum is not None:
            expected += quantized.minimum
        bits = computed(given, words, scale, scale / 3, part, table)
        assert torch.equal(bits.view(torch.int16), expected.to(tokens).view(torch.int16))


@pytest.mark.parametrize("code_map", CODE_MAPS, ids=lambda code_map: code_map.name)
def test_every_code_has_its_value(code_map: CodeMap) -> None:
    scale = torch.full((1 << code_map.bits,), 1.0 + 2**-20)  # not exact in 16 bits
    given = Format.of(pack_codes(weight_of(code_map, scale, minimum=False)), torch.bfloat16)
    table, codes = torch.tensor(code_map.values), torch.arange(1 << code_map.bits)
    codes = torch.where(codes & 0x7F == 0x7F, 0, codes) if code_map == E4M3 else codes
    for part in range(16 // code_map.bits):
        words = torch.stack((codes, codes.flip(0)), dim=1) << part * code_map.bits
        bits = computed(given, words, scale, scale, part, table)
        expected = (table[torch.stack((codes, codes.flip(0)), dim=1)] * scale[:, None]).bfloat16()
        assert torch.equal(bits.view(torch.bfloat16).float(), expected.float())
