"""Reads weights in MXFP4: e2m1 codes, and a scale for every 32 codes, which is a power of two (e8m0).

Checkpoints with `quant_method: mxfp4`, for example gpt-oss, store a weight [N, K] as `…_blocks` [N, K / 32, 16] and
`…_scales` [N, K / 32]. The format `mxfp4-pack-quantized` of compressed-tensors has the same bytes in `weight_packed`
[N, K / 2] and `weight_scale`. The first code of a byte is in its lower half.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from worker.checkpoint.checkpoint import CheckpointError
from worker.checkpoint.stored_weight import ExpectedTensor, Layout, ReadTensor, Shape, StoredTensors
from worker.ops.quantized_weight import E2M1, QuantizedWeight
from worker.quantization.awq import unpack
from worker.spec import StoredQuantization

GROUP, BIAS, NOT_A_NUMBER = 32, 127, 255


@dataclass(frozen=True, slots=True)
class MxFp4Weight:
    """A weight [N, K] in MXFP4. codes: two in a byte; scales: the exponents of powers of two, plus BIAS"""

    name: str
    shape: Shape
    checkpoint: StoredTensors
    codes: ExpectedTensor
    scales: ExpectedTensor

    @property
    def layout(self) -> Layout:
        return Layout(E2M1, GROUP)

    def tensors(self) -> list[ExpectedTensor]:
        return [self.codes, self.scales]

    def read(self, read: ReadTensor, dtype: torch.dtype) -> QuantizedWeight:
        codes = unpack(read(self.codes.name, self.codes.shape, torch.uint8).flatten(1), E2M1.bits)
        exponents = read(self.scales.name, self.scales.shape, torch.uint8)
        if bool((exponents == NOT_A_NUMBER).any()):
            where = self.checkpoint.where(self.scales.name)
            raise CheckpointError(f"{where}: tensor {self.scales.name} contains a number that is not finite")
        scale = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - BIAS)
        return QuantizedWeight(codes, E2M1, scale, None, GROUP)


@dataclass(frozen=True, slots=True)
class MxFp4:
    """A checkpoint with `quant_method: mxfp4`. A linear is quantized if the checkpoint has its `_blocks`."""

    @property
    def ignored(self) -> tuple[str, ...]:
        return ()

    @property
    def stored(self) -> StoredQuantization:
        return StoredQuantization("mxfp4")

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> MxFp4Weight | None:
        module = name.removesuffix(".weight")
        found = next((stem for stem in (name, module) if f"{stem}_blocks" in tensors), "")
        if not found:
            return None
        groups = _groups(name, shape, tensors)
        return MxFp4Weight(
            name, shape, tensors, ExpectedTensor(f"{found}_blocks", (shape[0], groups, GROUP // 2), ("U8",)),
            ExpectedTensor(f"{found}_scales", (shape[0], groups), ("U8",)),
        )  # fmt: skip


def packed_weight(name: str, shape: Shape, tensors: StoredTensors) -> MxFp4Weight:
    """Returns a weight in the format `mxfp4-pack-quantized` of compressed-tensors."""
    groups = _groups(name, shape, tensors)
    return MxFp4Weight(
        name, shape, tensors, ExpectedTensor(f"{name}_packed", (shape[0], groups * GROUP // 2), ("U8",)),
        ExpectedTensor(f"{name}_scale", (shape[0], groups), ("U8",)),
    )  # fmt: skip


def _groups(name: str, shape: Shape, tensors: StoredTensors) -> int:
    if shape[1] % GROUP:
        raise CheckpointError(
            f"{tensors.folder}: tensor {name} has {shape[1]} columns; in MXFP4 they are a multiple of {GROUP}"
        )
    return shape[1] // GROUP


def read(settings: Mapping[str, Any]) -> MxFp4:
    """Reads a quantization_config. It has no settings that change how weights are stored."""
    return MxFp4()
