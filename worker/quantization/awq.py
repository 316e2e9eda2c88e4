"""Reads checkpoints with `quant_method: awq` in the layout `gemm`: unsigned codes of 4 bits, packed along the outputs.

A weight [N, K] is stored as qweight [K, N / 8], qzeros [groups, N / 8] and scales [groups, N]. An int32 has the codes
of eight consecutive outputs; from the lowest bits on, they belong to the outputs 0, 2, 4, 6, 1, 3, 5, 7 of these eight.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.kernels.weights.quantized_weight import INT4, QuantizedWeight
from worker.model.checkpoint.checkpoint import CheckpointError
from worker.model.checkpoint.stored_weight import ExpectedTensor, Layout, ReadTensor, Shape, StoredTensors, check_finite
from worker.model.quantization.codes import check_group_size, signed
from worker.spec import StoredQuantization

METHOD, BITS = "awq", 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # ORDER[i]: to which of eight outputs the code at place i of an int32 belongs


@dataclass(frozen=True, slots=True)
class Awq:
    """The settings of an AWQ checkpoint. A linear is quantized if the checkpoint has its qweight.

    group_size: how many inputs share a scale; 0: all
    zero_point: if true, zero points are stored; otherwise every zero point is half the number of codes
    """

    group_size: int
    zero_point: bool

    @property
    def ignored(self) -> tuple[str, ...]:
        return () if self.zero_point else (".qzeros",)

    @property
    def stored(self) -> StoredQuantization:
        return StoredQuantization("int4", f"{self.group_size} values" if self.group_size else "a row")

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> "AwqWeight | None":
        exists = name.removesuffix("weight") + "qweight" in tensors
        return AwqWeight(name, shape, tensors, self) if exists else None


@dataclass(frozen=True, slots=True)
class AwqWeight:
    """A quantized weight [N, K] of an AWQ checkpoint."""

    name: str
    shape: Shape
    checkpoint: StoredTensors
    settings: Awq

    @property
    def layout(self) -> Layout:
        return Layout(INT4, self.settings.group_size, self.settings.zero_point)

    @property
    def group_size(self) -> int:
        return self.settings.group_size or self.shape[1]

    def tensors(self) -> list[ExpectedTensor]:
        (n, k), module = self.shape, self.name.removesuffix("weight")
        groups, words = -(-k // self.group_size), -(-n // len(ORDER))
        found = [
            ExpectedTensor(module + "qweight", (k, words), ("I32",)),
            ExpectedTensor(module + "scales", (groups, n)),
        ]
        zeros = ExpectedTensor(module + "qzeros", (groups, words), ("I32",))
        return [*found, zeros] if self.settings.zero_point else found

    def read(self, read: ReadTensor, dtype: torch.dtype) -> QuantizedWeight:
        qweight, scales, *rest = self.tensors()
        codes = self._unpack(read(qweight.name, qweight.shape, torch.int32))
        scale = check_finite(read(scales.name, scales.shape, torch.float32), scales.name, self.checkpoint)
        zero = self._unpack(read(rest[0].name, rest[0].shape, torch.int32)) if rest else None
        return signed(codes, BITS, scale.T.contiguous(), zero, self.group_size)

    def _unpack(self, words: Tensor) -> Tensor:
        """Unpacks int32 [X, N / 8] to codes [N, X]."""
        count, columns = words.shape[1], words.shape[0]
        bytes_ = words.T.flatten().view(torch.uint8).view(count, columns, 4)
        codes = torch.empty(count, len(ORDER), columns, dtype=torch.uint8, device=words.device)
        for at, output in enumerate(ORDER):
            torch.bitwise_right_shift(bytes_[..., at // 2], 4 * (at % 2), out=codes[:, output])
        return codes.bitwise_and_(15).flatten(0, 1)[: self.shape[0]]


def read(settings: Mapping[str, Any]) -> Awq:
    """Reads a quantization_config. Raises CheckpointError when a setting is not supported."""
    layout = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if layout != "gemm":
        raise CheckpointError(f"quant_method {METHOD!r}: version {layout!r} is not supported; supported is gemm")
    bits = settings.get("bits", settings.get("w_bit", BITS))
    if bits != BITS:
        raise CheckpointError(
            f"quant_method {METHOD!r}: weights of {bits} bits are not supported; supported are {BITS}"
        )
    size = check_group_size(settings.get("group_size", settings.get("q_group_size", 128)), METHOD)
    return Awq(size, bool(settings.get("zero_point", True)))
