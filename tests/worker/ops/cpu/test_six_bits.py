"""Codes that fit in six bits are stored in six bits. Products have the bits that they have with codes of eight bits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.gguf_blocks import random_rows
from tests.worker.ops.cpu.test_integer_codes import ROWS, inputs
from tests.worker.ops.harness.cpu_tiers import FASTER, HERE, needs_library, use
from worker.ops.block_rows import BlockFormat, BlockRows
from worker.ops.linear import native as linear_native
from worker.ops.linear.native import INT8_INPUTS6, INT8_INPUTS8, INTEGER6, INTEGER8, CpuWeight, pack_weight
from worker.ops.quantized_weight import QuantizedWeight
from worker.quantization.gguf import FORMATS

SIX_BITS = [format for format in FORMATS.values() if format.six_bits]
BF16 = torch.bfloat16
SHAPES = ((96, 256), (70, 512), (33, 1280))


def rows_in_blocks(type: str, n: int, k: int) -> BlockRows:
    """Returns random rows. The codes of the first ones are all smallest or all largest."""
    stored = torch.from_numpy(random_rows(n, k, type, np.random.default_rng(n), 0.05))
    format, scales = FORMATS[type], FORMATS[type].scales
    assert scales is not None
    for row, byte in enumerate((0, 255)):
        blocks = stored[row].view(-1, format.nbytes)
        kept = blocks[:, scales].clone()
        blocks[:] = byte
        blocks[:, scales] = kept
    return BlockRows(stored, format)


def in_eight_bits(rows: BlockRows) -> QuantizedWeight:
    weight = rows.quantized()
    assert weight.code_bits == rows.code_bits == 6
    return replace(weight, six_bits=False)


def kinds(weight: CpuWeight) -> list[int]:
    return [part.kind for part in weight.parts]


@needs_library
@pytest.mark.parametrize("int8_inputs", [False, True])
@pytest.mark.parametrize("which", [*HERE, *FASTER])
@pytest.mark.parametrize("format", SIX_BITS, ids=lambda format: format.name)
def test_products_have_the_bits_of_eight_bits(format: BlockFormat, which: str, int8_inputs: bool) -> None:
    """With AMX, only inputs of 8 bits have kernels for six bits."""
    for n, k in SHAPES:
        rows, x = rows_in_blocks(format.name, n, k), inputs(k)
        with use(which):
            both = (rows, in_eight_bits(rows))
            six, eight = (pack_weight([one], dtype=BF16, int8_inputs=int8_inputs) for one in both)
            assert kinds(eight) == [INT8_INPUTS8 if int8_inputs else INTEGER8]
            if int8_inputs or not which.startswith("amx"):
                assert kinds(six) == [INT8_INPUTS6 if int8_inputs else INTEGER6] and six.nbytes < 0.82 * eight.nbytes
            for count in (*range(1, 18), 33, 64, ROWS):
                products = (linear_native.linear(x[:count].contiguous(), one, torch.float32) for one in (six, eight))
                left, right = (product.view(torch.int32) for product in products)
                assert torch.equal(left, right), (n, k, count)


@needs_library
def test_rows_of_six_and_of_eight_bits_in_one_weight_keep_their_own() -> None:
    first, third = rows_in_blocks("Q5_0", 64, 256), rows_in_blocks("Q5_0", 32, 256)
    second = BlockRows(torch.from_numpy(random_rows(40, 256, "Q8_0", np.random.default_rng(2), 0.05)), FORMATS["Q8_0"])
    x = inputs(256)[:20].contiguous()
    with use(next(one for one in reversed(HERE) if not one.startswith("amx"))):
        mixed = pack_weight([first, second, third], dtype=BF16)
        assert kinds(mixed) == [INTEGER6, INTEGER8, INTEGER6]
        alone = [linear_native.linear(x, pack_weight([one], dtype=BF16)) for one in (first, second, third)]
        whole = linear_native.linear(x, mixed)
        assert torch.equal(whole.view(torch.int16), torch.cat(alone, dim=1).view(torch.int16))
