"""Reads checkpoints with `quant_method: bitsandbytes` and 4 bits: nf4 or fp4 codes, and a scale for a block of codes.

A byte holds two codes, the first one in the upper half. The tensor `absmax` has the scales. With double quantization,
`absmax` has codes of eight bits instead, and a scale is nested_quant_map[code] times its `nested_absmax`, plus an
offset. A tensor with JSON text has the sizes. Blocks run over the whole weight regardless of rows, so a row must
consist of whole blocks, or a block of whole rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from worker.checkpoint.checkpoint import CheckpointError
from worker.checkpoint.stored_weight import ExpectedTensor, Layout, ReadTensor, Shape, StoredTensors, check_finite
from worker.ops.quantized_weight import E4M3, NF4, CodeMap, QuantizedWeight, divided
from worker.spec import StoredQuantization

METHOD = "bitsandbytes"
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # 12 times the positive numbers of fp4; E4M3 can represent them all
FP4 = tuple(value / 12 for value in (*_FP4, *(-value for value in _FP4)))
NUMBERS = {"nf4": NF4.values, "fp4": FP4}  # quant_type → the number that each code stands for


class QuantState(msgspec.Struct):
    """The JSON text that a checkpoint stores beside each weight."""

    blocksize: int
    shape: list[int]
    nested_blocksize: int = 0
    nested_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """The settings of a bitsandbytes checkpoint. A linear is quantized if the checkpoint has its absmax."""

    kind: str  # nf4 or fp4

    @property
    def ignored(self) -> tuple[str, ...]:
        return ()

    @property
    def stored(self) -> StoredQuantization:
        return StoredQuantization(self.kind)

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> "BitsAndBytesWeight | None":
        if f"{name}.absmax" not in tensors:
            return None
        blocks = max(1, torch.Size(tensors.shape(f"{name}.absmax")).numel())
        return BitsAndBytesWeight(name, shape, tensors, self.kind, blocks, f"{name}.nested_absmax" in tensors)


@dataclass(frozen=True, slots=True)
class BitsAndBytesWeight:
    """A quantized weight [N, K] of a bitsandbytes checkpoint."""

    name: str
    shape: Shape
    checkpoint: StoredTensors
    kind: str
    blocks: int
    nested: bool

    @property
    def code_map(self) -> CodeMap:
        return NF4 if self.kind == "nf4" else E4M3

    @property
    def layout(self) -> Layout:
        return Layout(self.code_map, min(self.shape[0] * self.shape[1] // self.blocks, self.shape[1]))

    def tensors(self) -> list[ExpectedTensor]:
        """Returns the expected tensors. The sizes in the JSON text are checked later, when the weight is read."""
        own = [
            ExpectedTensor(self.name, (self.shape[0] * self.shape[1] // 2, 1), ("U8",)),
            ExpectedTensor(f"{self.name}.absmax", (self.blocks,), ("U8",) if self.nested else ("F32",)),
            ExpectedTensor(f"{self.name}.quant_map", (16,), ("F32",)),
            self._as_is(f"{self.name}.quant_state.bitsandbytes__{self.kind}", "U8"),
        ]
        if not self.nested:
            return own
        absmax = self._as_is(f"{self.name}.nested_absmax", "F32")
        return [*own, absmax, ExpectedTensor(f"{self.name}.nested_quant_map", (256,), ("F32",))]

    def _as_is(self, name: str, format: str) -> ExpectedTensor:
        return ExpectedTensor(name, self.checkpoint.shape(name) if name in self.checkpoint else (), (format,))

    def read(self, read: ReadTensor, dtype: torch.dtype) -> QuantizedWeight:
        values, absmax, numbers, json, *nested = self.tensors()
        packed = read(values.name, values.shape, torch.uint8).flatten()
        scale = read(absmax.name, absmax.shape, torch.uint8 if self.nested else torch.float32)
        table = read(numbers.name, numbers.shape, torch.float32)
        state = self._state(read(json.name, json.shape, torch.uint8), json.name)
        if not torch.allclose(table.cpu(), torch.tensor(NUMBERS[self.kind]), atol=1e-6):
            raise self._wrong(numbers.name, f"is not the table of {self.kind}")
        if nested:
            outer, codes = (read(tensor.name, tensor.shape, torch.float32) for tensor in nested)
            if state.nested_blocksize * outer.numel() < self.blocks:
                raise self._wrong(nested[0].name, f"has {outer.numel()} scales for {self.blocks} numbers")
            outer = outer.repeat_interleave(state.nested_blocksize)[: self.blocks]
            scale = codes[scale.int()] * outer + state.nested_offset
        check_finite(scale, absmax.name, self.checkpoint)
        codes = torch.stack((packed >> 4, packed & 15), dim=-1).view(self.shape)
        size = self._group_size(state)
        scale = scale.repeat_interleave(state.blocksize // size).view(self.shape[0], -1)
        if self.kind == "nf4":
            return QuantizedWeight(codes, NF4, scale, None, size)
        eight = torch.tensor(FP4, device=codes.device).mul(12).to(torch.float8_e4m3fn).view(torch.uint8)
        return QuantizedWeight(eight[codes.int()], E4M3, divided(scale, 12), None, size)

    def _state(self, json: Tensor, name: str) -> QuantState:
        try:
            state = msgspec.json.decode(bytes(json.cpu().tolist()), type=QuantState)
        except msgspec.DecodeError as error:
            raise self._wrong(name, f"does not describe the weight ({error})") from error
        if tuple(state.shape) != self.shape or state.blocksize * self.blocks != self.shape[0] * self.shape[1]:
            raise self._wrong(name, f"describes a weight {state.shape} in blocks of {state.blocksize}")
        return state

    def _group_size(self, state: QuantState) -> int:
        """Returns how many inputs of a row share a scale."""
        block, columns = state.blocksize, self.shape[1]
        if columns % block == 0 and block % 16 == 0:
            return block
        if block % columns == 0:
            return columns
        raise self._wrong(self.name, f"has rows of {columns} numbers, which blocks of {block} do not divide")

    def _wrong(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.checkpoint.where(name)}: tensor {name} {problem}")


def read(settings: Mapping[str, Any]) -> BitsAndBytes:
    """Reads a quantization_config. Raises CheckpointError when a setting is not supported."""
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    if not settings.get("load_in_4bit") or kind not in NUMBERS:
        what = f"bnb_4bit_quant_type {kind!r}" if settings.get("load_in_4bit") else "weights of 8 bits"
        raise CheckpointError(
            f"quant_method {METHOD!r}: {what} are not supported; supported are 4 bits in {', '.join(NUMBERS)}"
        )
    return BitsAndBytes(kind)
