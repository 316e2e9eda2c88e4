"""A weight that is packed from its blocks, panel by panel, has the bytes of its unpacked form's packing."""

import numpy as np
import pytest
import torch

from tests.gguf_blocks import random_rows
from tests.worker.ops.harness.cpu_tiers import needs_library, tier  # noqa: F401
from worker.ops.block_rows import BlockRows
from worker.ops.linear.native import CpuWeight, pack_weight
from worker.quantization.gguf import FORMATS

pytestmark = needs_library
DTYPES = [torch.float32, torch.bfloat16]


def blocks(type: str, rows: int, columns: int = 512, seed: int = 0) -> BlockRows:
    made = random_rows(rows, columns, type, np.random.default_rng(seed), 0.05)
    return BlockRows(torch.from_numpy(made), FORMATS[type])


def equal(one: CpuWeight, other: CpuWeight) -> bool:
    pairs = list(zip(one.parts, other.parts, strict=True))
    numbers = all((a.n, a.k, a.group, a.kind, a.factor) == (b.n, b.k, b.group, b.kind, b.factor) for a, b in pairs)
    return numbers and all(torch.equal(a.tensors[name], b.tensors[name]) for a, b in pairs for name in a.tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("type", FORMATS)
def test_every_format(type: str, dtype: torch.dtype, tier: str) -> None:  # noqa: F811
    for rows in (70, 64, 1):
        weight = blocks(type, rows)
        for int8 in (False, True):
            both = ([weight], [weight.quantized()])
            assert equal(*(pack_weight(one, torch.ones(rows), dtype=dtype, int8_inputs=int8) for one in both))


STACKS = {
    "one layout in memory, and another one": (("Q8_0", 64), ("Q5_0", 32), ("Q4_K", 32)),
    "parts that share a panel, of different formats": (("Q8_0", 50), ("Q5_0", 30), ("Q8_0", 7)),
    "parts that share a panel, of one format": (("Q6_K", 50), ("Q6_K", 30), ("Q6_K", 7)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stacked", STACKS.values(), ids=list(STACKS))
def test_stacks_of_formats(stacked: tuple[tuple[str, int], ...], dtype: torch.dtype) -> None:
    parts = [blocks(type, rows, seed=rows) for type, rows in stacked]
    unpacked = [part.quantized() for part in parts]
    expected = pack_weight(unpacked, dtype=dtype)
    assert equal(pack_weight(parts, dtype=dtype), expected)
    assert equal(pack_weight([parts[0], unpacked[1], parts[2]], dtype=dtype), expected), "one part is unpacked already"
    plain = parts[1].dequantize(dtype)
    mixed = [(parts[0], plain, parts[2]), (unpacked[0], plain, unpacked[2])]
    assert equal(*(pack_weight(each, dtype=dtype) for each in mixed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_chosen_rows(dtype: torch.dtype) -> None:
    weight, order = blocks("Q4_K", 70), torch.randperm(70)
    for index in (order, order[:33], slice(32, 70)):
        both = (weight.rows(index), weight.quantized().rows(index))
        assert equal(*(pack_weight([one], dtype=dtype) for one in both))
