"""Test cases for matrix products with four- or eight-bit weights in groups: every code map and group size."""

from collections.abc import Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.checks.random_inputs import Case, RandomTensors
from bench.gpu.environment import Environment
from worker.ops.activation.reference import act_and_mul_torch
from worker.ops.linear import gated_linear, linear
from worker.ops.linear.packed import pack_stacked
from worker.ops.quantized_weight import E2M1, E4M3, INT4, INT8, IQ4_NL, NF4, CodeMap, QuantizedWeight

CODE_MAPS = (INT4, INT8, E2M1, E4M3, NF4, IQ4_NL)
GROUP_SIZES = (16, 32, 64, 128, 1 << 20)
ROWS = (1, 16, 33, 64, 130, 257)
SCALES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1536, 1152), (1024, 520), (5120, 3072))


def few_bits_cases(env: Environment) -> Iterator[Case]:
    random = RandomTensors(env)
    formats = product(CODE_MAPS, GROUP_SIZES, (False, True))
    for at, (code_map, group_size, minimum) in enumerate(env.sample(formats)):
        rows, (n, k), scales = ROWS[at % len(ROWS)], SHAPES[at // 2 % len(SHAPES)], SCALES[at % len(SCALES)]
        weight = few_bits_weight(random, n, k, code_map, min(group_size, k + -k % 16), scales, minimum=minimum)
        other = few_bits_weight(random, 256, k, INT8, 32, torch.float32, minimum=True)
        yield _linear(random(rows, k), [weight, other] if at % 2 else [weight], random(n + at % 2 * 256))
        yield _gated(random(rows, k), weight)


def few_bits_weight(
    random: RandomTensors, n: int, k: int, code_map: CodeMap, group_size: int, scales: torch.dtype, *, minimum: bool
) -> QuantizedWeight:
    """Returns a weight with random codes. Its scales make a product about as large as the input."""
    values = torch.tensor(code_map.values).to(random.device)
    codes = (random(n, k, dtype=torch.float32).abs() * 4096).long() % len(code_map.values)
    codes = torch.where(codes % 128 == 127, 0, codes) if code_map is E4M3 else codes  # no checkpoint has E4M3's NaNs
    groups, std = -(-k // group_size), float(values.square().mean().sqrt() * k**0.5)
    scale = random(n, groups, dtype=torch.float32).div_(std).to(scales).float()
    added = random(n, groups, dtype=torch.float32).div_(k**0.5).to(scales).float() if minimum else None
    return QuantizedWeight(codes.to(torch.uint8), code_map, scale, added, group_size)


def _full(parts: list[QuantizedWeight]) -> Tensor:
    return torch.cat([part.dequantize(torch.float32) for part in parts])


def _label(kind: str, x: Tensor, parts: list[QuantizedWeight]) -> str:
    formats = (f"{part.code_map.name} in groups of {part.group_size}, {part.minimum is not None}" for part in parts)
    return f"{kind} {tuple(x.shape)} x {parts[0].shape} of {'; '.join(formats)}"


def _linear(x: Tensor, parts: list[QuantizedWeight], bias: Tensor) -> Case:
    packed = pack_stacked(parts, bias, dtype=x.dtype, invariant=True)
    return Case(
        _label("linear", x, parts),
        lambda: (linear(x, packed),),
        lambda: (F.linear(x.float(), _full(parts), bias.float()),),
    )


def _gated(x: Tensor, weight: QuantizedWeight) -> Case:
    packed = pack_stacked([weight], dtype=x.dtype, invariant=True)
    return Case(
        _label("gated_linear", x, [weight]),
        lambda: (gated_linear(x, packed, "silu"),),
        lambda: (act_and_mul_torch(F.linear(x.float(), _full([weight])), "silu"),),
    )
