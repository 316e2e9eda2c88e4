"""Makes the experts of a layer for tests of kernels, in each format in which a GPU keeps experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.worker.ops.harness.cases import random
from worker.ops.linear.packed import PackedLinear
from worker.ops.moe.packed import Experts, PackedExperts, pack_experts_on_gpu
from worker.ops.quantized_weight import CodeMap, Kind, QuantizedWeight, quantize, quantize_groups
from worker.spec import Activation


@dataclass(frozen=True)
class Format:
    """A format of experts' weights: codes of a map in groups, eight bits with a scale per row, or plain numbers."""

    code_map: CodeMap | None = None
    group_size: int = 32
    kind: Kind | None = None
    dynamic: bool = False


PLAIN = Format()


def packed(weights: Sequence[Tensor], bias: Tensor | None, format: Format, dtype: torch.dtype) -> PackedExperts:
    """Packs one linear of every expert, as `pack_experts` and `pack_quantized_experts` do it on a GPU."""
    if format.kind is not None:
        values, scales = zip(*(quantize(weight, format.kind) for weight in weights), strict=True)
        return PackedExperts(torch.stack(values), bias, scale=torch.stack(scales), dynamic=format.dynamic)
    parts: list[list[Tensor | QuantizedWeight]] = [[weight.to(dtype)] for weight in weights]
    if format.code_map is not None:
        parts = [[quantized(weight, format)] for weight in weights]
    weight, codes = pack_experts_on_gpu(parts, len(parts), dtype)
    return PackedExperts(weight, bias, codes=codes)


def quantized(weight: Tensor, format: Format) -> QuantizedWeight:
    assert format.code_map is not None
    if format.code_map.name.startswith("int"):
        return quantize_groups(weight, format.code_map, format.group_size)
    n, k = weight.shape
    largest = max(map(abs, format.code_map.values))
    codes = (weight.abs() * 4096).long() % len(format.code_map.values)
    groups = -(-k // format.group_size)
    scale = (weight.abs().amax(dim=1, keepdim=True) / largest).bfloat16().float().expand(n, groups)
    return QuantizedWeight(codes.to(torch.uint8), format.code_map, scale.contiguous(), None, format.group_size)


def layer_of(
    count: int,
    hidden: int,
    inner: int,
    format: Format = PLAIN,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    bias: bool = False,
) -> Experts:
    """Returns random experts whose outputs are about as large as their inputs."""

    def linear(n: int, k: int, seed: int) -> PackedExperts:
        weights = [random(n, k, device=device, seed=seed + expert).mul_(k**-0.5) for expert in range(count)]
        return packed(weights, random(count, n, dtype=dtype, device=device, seed=seed) if bias else None, format, dtype)

    router_bias = random(count, dtype=dtype, device=device, seed=3) if bias else None
    router = PackedLinear(random(count, hidden, dtype=dtype, device=device, seed=1) * hidden**-0.5, router_bias, True)
    return Experts(router, linear(2 * inner, hidden, 10), linear(hidden, inner, 1000))


def experts_on_triton(h: Tensor, layer: Experts, chosen: int, activation: Activation, **how: Any) -> Tensor:
    """Calls `experts` as the worker does on a GPU."""
    from worker.ops.linear.triton import linear_triton
    from worker.ops.moe import triton as experts

    def linear(x: Tensor, packed: PackedLinear, *, fp32_out: bool) -> Tensor:
        return linear_triton(x, packed.weight, packed.bias, fp32_out=fp32_out)

    with patch.object(experts, "linear", linear):
        return experts.experts_triton(h, layer, chosen, activation, **how)
