"""Makes a layer's experts with random weights directly on the device, in any format."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from worker.ops.linear.packed import pack
from worker.ops.moe.packed import Experts, PackedExperts, pack_experts, pack_quantized_experts
from worker.ops.quantized_weight import CodeMap, QuantizedWeight, Scheme, quantize
from worker.spec import ModelSpec

# Scheme: one scale per row; (code map, group size): one scale per group; None: not quantized
Stored = Scheme | tuple[CodeMap, int] | None


def random_experts(spec: ModelSpec, dtype: torch.dtype, generator: torch.Generator, stored: Stored = None) -> Experts:
    """Returns experts on the generator's device. Their weights make results about as large as the input."""
    of, hidden = spec.experts, spec.hidden_size
    assert of is not None

    def normal(*shape: int, std: float) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=generator.device).normal_(0.0, std, generator=generator)

    def bias(wanted: bool, *shape: int) -> Tensor | None:
        return normal(*shape, std=0.1) if wanted else None

    def linear(rows: int, columns: int) -> PackedExperts:
        how: dict[str, Any] = {"count": of.count, "dtype": dtype, "invariant": True}
        added = bias(of.bias, of.count, rows)
        if isinstance(stored, tuple):
            codes = ([_random_codes(rows, columns, *stored, generator)] for _ in range(of.count))
            return pack_experts(codes, added, **how)
        weights: Iterator[Tensor] = (normal(rows, columns, std=columns**-0.5) for _ in range(of.count))
        if stored is None:
            return pack_experts(([weight] for weight in weights), added, **how)
        eight = (quantize(weight, stored.kind) for weight in weights)
        return pack_quantized_experts(eight, added, dynamic=stored.dynamic, **how)

    router = pack(normal(of.count, hidden, std=hidden**-0.5), bias(of.router_bias, of.count), invariant=True)
    return Experts(router, linear(2 * of.intermediate_size, hidden), linear(hidden, of.intermediate_size))


def _random_codes(
    rows: int, columns: int, code_map: CodeMap, group_size: int, generator: torch.Generator
) -> QuantizedWeight:
    device, values = generator.device, torch.tensor(code_map.values)
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=device)
    codes.random_(0, len(code_map.values), generator=generator)
    scale = float((columns**-0.5 / values.square().mean().sqrt()).bfloat16())
    groups = -(-columns // group_size)
    return QuantizedWeight(codes, code_map, torch.full((rows, groups), scale, device=device), None, group_size)
