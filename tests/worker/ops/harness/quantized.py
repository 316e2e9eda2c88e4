"""Makes random quantized weights for tests of kernels."""

from dataclasses import replace

import torch

from worker.ops.quantized_weight import (
    E2M1,
    E4M3,
    INT4,
    INT8,
    IQ1,
    IQ2,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    NF4,
    CodeMap,
    QuantizedWeight,
)

CODE_MAPS = [INT4, INT8, E4M3, E2M1, NF4, IQ4_NL, IQ3_S, IQ3_XXS, IQ2, IQ1]


def quantized(
    code_map: CodeMap, n: int = 6, k: int = 80, group_size: int = 32, *, minimum: bool = False
) -> QuantizedWeight:
    """Returns a weight [n, k] whose scales and minimums are exact in sixteen bits, so that every kernel keeps them."""
    generator = torch.Generator().manual_seed(n * k + group_size)
    codes = torch.randint(0, 1 << code_map.bits, (n, k), generator=generator, dtype=torch.uint8)
    if code_map is E4M3:
        codes[codes % 128 == 127] = 0  # NaN
    groups = (n, -(-k // group_size))
    scale = (torch.rand(groups, generator=generator) + 0.5).half().float()
    added = torch.randn(groups, generator=generator).half().float() if minimum else None
    return QuantizedWeight(codes, code_map, scale, added, group_size)


def with_scales(weight: QuantizedWeight, dtype: torch.dtype) -> QuantizedWeight:
    """Returns the weight with scales and minimums that are exact in `dtype`, but in no smaller format."""
    factor = 1 + 2**-20 if dtype == torch.float32 else 1 + 2**-10 if dtype == torch.float16 else 1.0
    scale = (weight.scale.bfloat16().float() * factor).to(dtype).float()
    minimum = None if weight.minimum is None else (weight.minimum.bfloat16().float() * factor).to(dtype).float()
    return replace(weight, scale=scale, minimum=minimum)
