"""Reads weights in NVFP4: e2m1 codes, an e4m3 scale for every 16 codes, and one float32 number for the whole weight.

The libraries compressed-tensors and modelopt write this format under different names:

    compressed-tensors   weight_packed [N, K / 2], weight_scale [N, K / 16], weight_global_scale: divides the scales
    modelopt             weight [N, K / 2], weight_scale [N, K / 16], weight_scale_2: multiplies the scales

The first code of a byte is in its lower half. A scale in memory is the scale of the 16 codes, already multiplied.
"""

from dataclasses import dataclass

import torch

from worker.checkpoint.checkpoint import CheckpointError
from worker.checkpoint.stored_weight import (
    ExpectedTensor,
    Layout,
    ReadTensor,
    Shape,
    StoredTensors,
    check_finite,
)
from worker.ops.quantized_weight import E2M1, QuantizedWeight
from worker.quantization.awq import unpack

GROUP = 16


@dataclass(frozen=True, slots=True)
class NvFp4Weight:
    """A weight [N, K] in NVFP4.

    whole: the tensor with the one number for the weight; divides: whether it divides the scales or multiplies them
    """

    name: str
    shape: Shape
    checkpoint: StoredTensors
    codes: ExpectedTensor
    scales: ExpectedTensor
    whole: ExpectedTensor
    divides: bool

    @property
    def layout(self) -> Layout:
        return Layout(E2M1, GROUP)

    def tensors(self) -> list[ExpectedTensor]:
        return [self.codes, self.scales, self.whole]

    def read(self, read: ReadTensor, dtype: torch.dtype) -> QuantizedWeight:
        codes = unpack(read(self.codes.name, self.codes.shape, torch.uint8), E2M1.bits)
        scale = read(self.scales.name, self.scales.shape, torch.float8_e4m3fn).float()
        whole = read(self.whole.name, self.whole.shape or (1,), torch.float32)
        check_finite(scale, self.scales.name, self.checkpoint)
        if self.divides and not bool(whole.all()):
            where = self.checkpoint.where(self.whole.name)
            raise CheckpointError(f"{where}: tensor {self.whole.name} is 0, by which scales cannot be divided")
        check_finite(whole, self.whole.name, self.checkpoint)
        scale = scale / whole if self.divides else scale * whole
        return QuantizedWeight(codes, E2M1, check_finite(scale, self.name, self.checkpoint), None, GROUP)


def packed_weight(name: str, shape: Shape, tensors: StoredTensors) -> NvFp4Weight:
    """Returns a weight in the format `nvfp4-pack-quantized` of compressed-tensors."""
    return _weight(name, shape, tensors, f"{name}_packed", f"{name}_global_scale", divides=True)


def modelopt_weight(name: str, shape: Shape, tensors: StoredTensors) -> NvFp4Weight:
    """Returns a weight as modelopt exports it."""
    return _weight(name, shape, tensors, name, f"{name}_scale_2", divides=False)


def _weight(name: str, shape: Shape, tensors: StoredTensors, codes: str, whole: str, *, divides: bool) -> NvFp4Weight:
    n, k = shape
    if k % GROUP:
        raise CheckpointError(
            f"{tensors.folder}: tensor {name} has {k} columns; in NVFP4 they are a multiple of {GROUP}"
        )
    one = tensors.shape(whole) if whole in tensors else (1,)
    return NvFp4Weight(
        name, shape, tensors, ExpectedTensor(codes, (n, k // 2), ("U8",)),
        ExpectedTensor(f"{name}_scale", (n, k // GROUP), ("F8_E4M3",)),
        ExpectedTensor(whole, one if one == () else (1,), ("F32",)), divides,
    )  # fmt: skip
