"""Reads weights in MXFP4 and MXFP8: e2m1 or e4m3 codes, and a scale for every 32 codes, a power of two (e8m0).

Checkpoints with `quant_method: mxfp4`, for example gpt-oss, store a weight [N, K] as `…_blocks` [N, K / 32, 16] and
`…_scales` [N, K / 32]. The format `mxfp4-pack-quantized` of compressed-tensors has the same bytes in `weight_packed`
[N, K / 2] and `weight_scale`. The first code of a byte is in its lower half. In MXFP8, compressed-tensors and modelopt
store `weight` [N, K] and `weight_scale` [N, K / 32].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.checkpoint.checkpoint import CheckpointError
from worker.checkpoint.stored_weight import ExpectedTensor, Layout, ReadTensor, Shape, StoredTensors
from worker.ops.quantized_weight import E2M1, E4M3, QuantizedWeight
from worker.quantization.awq import unpack
from worker.quantization.fp8 import check_no_nan
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
        return QuantizedWeight(codes, E2M1, _read_scales(self.scales, read, self.checkpoint), None, GROUP)


@dataclass(frozen=True, slots=True)
class MxFp8Weight:
    """A weight [N, K] in MXFP8. scales: the exponents of powers of two, plus BIAS"""

    name: str
    shape: Shape
    checkpoint: StoredTensors

    @property
    def layout(self) -> Layout:
        return Layout(E4M3, GROUP)

    def tensors(self) -> list[ExpectedTensor]:
        groups = _groups(self.name, self.shape, self.checkpoint)
        return [
            ExpectedTensor(self.name, self.shape, ("F8_E4M3",)),
            ExpectedTensor(f"{self.name}_scale", (self.shape[0], groups), ("U8",)),
        ]

    def read(self, read: ReadTensor, dtype: torch.dtype) -> QuantizedWeight:
        values, scales = self.tensors()
        codes = read(values.name, values.shape, torch.float8_e4m3fn).view(torch.uint8)
        check_no_nan(codes, self.name, self.checkpoint)
        return QuantizedWeight(codes, E4M3, _read_scales(scales, read, self.checkpoint), None, GROUP)


def mxfp8_weight(name: str, shape: Shape, tensors: StoredTensors) -> MxFp8Weight:
    return MxFp8Weight(name, shape, tensors)


def _read_scales(scales: ExpectedTensor, read: ReadTensor, tensors: StoredTensors) -> Tensor:
    """Reads exponents and returns the powers of two, float32."""
    exponents = read(scales.name, scales.shape, torch.uint8)
    if bool((exponents == NOT_A_NUMBER).any()):
        raise CheckpointError(
            f"{tensors.where(scales.name)}: tensor {scales.name} contains a number that is not finite"
        )
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - BIAS)


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
            f"{tensors.folder}: tensor {name} has {shape[1]} columns; in MXFP4 and MXFP8 they are a multiple of {GROUP}"
        )
    return shape[1] // GROUP


def read(settings: Mapping[str, Any]) -> MxFp4:
    """Reads a quantization_config. It has no settings that change how weights are stored."""
    return MxFp4()
