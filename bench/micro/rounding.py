"""Rounds weights to the few-bit formats that published checkpoints use, for bench/micro/quantization.py.

Each function rounds weight [N, K] to nearest and returns codes, scales and minimums as a checkpoint would have them.
No function uses calibration text. Tools that search for better scales lose less accuracy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.checkpoint.stored_weight import (
    ExpectedTensor,
    Layout,
    ReadTensor,
    Shape,
    StoredTensors,
    StoredWeight,
    WeightSource,
)
from worker.ops.quantized_weight import E2M1, INT4, NF4, CodeMap, QuantizedWeight

Rounding = Callable[[Tensor], QuantizedWeight]

SUPER_BLOCK = 8  # groups of Q4_K that share the two fp16 factors of their scales and minimums


def mxfp4(weight: Tensor) -> QuantizedWeight:
    """Rounds groups of 32 weights to e2m1. Scales are powers of two, as the OCP Microscaling specification says."""
    x = _groups(weight, 32)
    largest = x.abs().amax(2, keepdim=True).clamp(min=2.0**-120)
    scale = torch.exp2(largest.log2().floor() - 2)  # 2: the exponent of e2m1's largest number, 6
    return _record(weight, _nearest(x / scale, E2M1), E2M1, scale, None, 32)


def nf4(weight: Tensor) -> QuantizedWeight:
    """Rounds groups of 64 weights to NF4, scaled so that the largest of a group is 1, as bitsandbytes does."""
    x = _groups(weight, 64)
    scale = x.abs().amax(2, keepdim=True).clamp(min=1e-30)
    return _record(weight, _nearest(x / scale, NF4), NF4, scale, None, 64)


def q4_k(weight: Tensor) -> QuantizedWeight:
    """Rounds groups of 32 weights to codes from 0 to 15. A group has a scale and a minimum of six bits each. Eight
    groups (a super-block) share two fp16 factors: one for their scales and one for their minimums.

    Scale and minimum come from the extremes of a group; llama.cpp searches for the scale and minimum with the smallest
    error. A row whose length is no multiple of 256 ends with a short super-block; llama.cpp stores such a row in
    another format.
    """
    x = _groups(weight, 32)
    lowest = x.amin(2, keepdim=True).clamp(max=0)
    scale = _six_bits((x.amax(2, keepdim=True) - lowest) / 15)
    minimum = -_six_bits(-lowest)
    codes = ((x - minimum) / scale.clamp(min=1e-30)).round().clamp(0, 15)
    return _record(weight, (codes.long() - 8) & 15, INT4, scale, minimum + 8 * scale, 32)


def _six_bits(values: Tensor) -> Tensor:
    """Rounds values of at least 0, [N, groups, 1], to the closest of 0, 1, …, 63 times their super-block's fp16
    factor."""
    rounded = []
    for block in torch.split(values, SUPER_BLOCK, dim=1):
        factor = (block.amax(1, keepdim=True) / 63).half().float().clamp(min=1e-30)
        rounded.append((block / factor).round().clamp(0, 63) * factor)
    return torch.cat(rounded, dim=1)


def _groups(weight: Tensor, size: int) -> Tensor:
    """Returns the weight as [N, groups, size] in float32. The rows here consist of whole groups."""
    assert weight.shape[1] % size == 0
    return weight.float().view(len(weight), -1, size)


def _nearest(x: Tensor, code_map: CodeMap) -> Tensor:
    return (x[..., None] - torch.tensor(code_map.values)).abs().argmin(-1)


def _record(
    weight: Tensor, codes: Tensor, code_map: CodeMap, scale: Tensor, minimum: Tensor | None, size: int
) -> QuantizedWeight:
    lowest = None if minimum is None else minimum.squeeze(2)
    return QuantizedWeight(codes.view(weight.shape).to(torch.uint8), code_map, scale.squeeze(2), lowest, size)


ROUNDINGS: dict[str, Rounding] = {"MXFP4": mxfp4, "NF4": nf4, "Q4_K": q4_k}


@dataclass(frozen=True, slots=True)
class RoundedSource:
    """A checkpoint in full precision, read as if the linears of its layers were stored rounded."""

    source: WeightSource
    rounding: Rounding

    @property
    def tensors(self) -> StoredTensors:
        return self.source.tensors

    @property
    def ignored(self) -> tuple[str, ...]:
        return self.source.ignored

    def weight(self, name: str, shape: Shape, transposed: bool | None = False) -> StoredWeight:
        stored = self.source.weight(name, shape, transposed)
        return RoundedWeight(stored, self.rounding) if ".layers." in name else stored

    def close(self) -> None:
        self.source.close()


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    stored: StoredWeight
    rounding: Rounding

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def shape(self) -> Shape:
        return self.stored.shape

    @property
    def layout(self) -> Layout:
        return Layout(INT4, 32)  # only the size of this layout matters here

    def tensors(self) -> Sequence[ExpectedTensor]:
        return self.stored.tensors()

    def read(self, read: ReadTensor, dtype: torch.dtype) -> QuantizedWeight:
        full = self.stored.read(read, torch.float32)
        assert isinstance(full, Tensor)
        return self.rounding(full)
