"""Makes random experts, packed and as plain tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.worker.ops.harness.cases import random
from worker.ops.linear.packed import PackedLinear, pack
from worker.ops.moe.packed import Experts, PackedExperts, pack_experts
from worker.ops.quantized_weight import CodeMap, QuantizedWeight, quantize_groups

Part = Tensor | QuantizedWeight


@dataclass(frozen=True)
class Sizes:
    count: int = 8
    hidden: int = 96
    inner: int = 80
    bias: bool = False


def part(n: int, k: int, code_map: CodeMap | None, dtype: torch.dtype, seed: int) -> Part:
    plain = (random(n, k, seed=seed) / k**0.5).to(dtype)
    return plain if code_map is None else quantize_groups(plain, code_map, 32)


def parts_of(sizes: Sizes, code_maps: list[CodeMap | None], dtype: torch.dtype) -> tuple[list[list[Part]], ...]:
    """Returns gate and up, and down, of every expert. Experts have the formats of `code_maps` in turn."""
    formats = [code_maps[i % len(code_maps)] for i in range(3 * sizes.count)]
    gate_up = [
        [part(sizes.inner, sizes.hidden, formats[3 * i + j], dtype, 100 * i + j) for j in range(2)]
        for i in range(sizes.count)
    ]
    down = [[part(sizes.hidden, sizes.inner, formats[3 * i + 2], dtype, 100 * i + 7)] for i in range(sizes.count)]
    return gate_up, down


def plain(parts: list[list[Part]], bias: Tensor | None, dtype: torch.dtype) -> PackedExperts:
    """Returns the experts in the form that `experts_torch` reads."""
    every = [[x if isinstance(x, Tensor) else x.dequantize(dtype) for x in expert] for expert in parts]
    return PackedExperts(torch.stack([torch.cat(expert) for expert in every]), bias)


def made(
    sizes: Sizes, dtype: torch.dtype, code_maps: list[CodeMap | None], router: Tensor | None = None
) -> tuple[Experts, Experts]:
    """Returns the experts as packed for this machine, and as plain tensors. router [E, H]: random by default"""
    gate_up, down = parts_of(sizes, code_maps, dtype)
    wide, narrow = (
        random(sizes.count, width, dtype=dtype) if sizes.bias else None for width in (2 * sizes.inner, sizes.hidden)
    )
    matrix = random(sizes.count, sizes.hidden) / sizes.hidden**0.5 if router is None else router
    number = sizes.count

    def packed(parts: list[list[Part]], bias: Tensor | None) -> PackedExperts:
        return pack_experts(parts, bias, count=number, dtype=dtype, invariant=True)

    matrix = matrix.to(dtype)
    return (
        Experts(pack(matrix, invariant=True), packed(gate_up, wide), packed(down, narrow)),
        Experts(PackedLinear(matrix, None, False), plain(gate_up, wide, dtype), plain(down, narrow, dtype)),
    )
