"""Multiplies by a weight that is packed once and read in every step.

With `invariant`, the result of a row never depends on the other rows. Library GEMMs choose the order of additions over
K by the number of rows. So `invariant` selects a kernel whose order depends only on the weight's shape. Quantized
weights always use this kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.ops import native as c_library
from worker.ops.linear.native import Coded, CpuWeight, pack_weight
from worker.ops.linear.packed_codes import PackedCodes, pack_codes
from worker.ops.native import Memory
from worker.ops.quantized_weight import QuantizedWeight, dequantize, stack


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight prepared for `linear`."""

    weight: Tensor  # [N, K]; empty if `cpu` or `codes` hold the weight; int8 or float8_e4m3fn if there is a `scale`
    bias: Tensor | None  # [N]
    invariant: bool
    cpu: CpuWeight | None = None  # the weight, packed for the C library
    scale: Tensor | None = None  # [N] float32
    dynamic: bool = False  # if true, rows of the input are quantized to the weight's format
    codes: tuple[PackedCodes, ...] = ()  # a weight quantized in groups, on a GPU; each part holds some of its rows
    whole_rows: int = 0  # the rows of the whole weight if a rank has only N of them: they decide where K is split

    @property
    def nbytes(self) -> int:
        codes = (tensor for part in self.codes for tensor in (part.codes, part.scale, part.minimum))
        held = sum(x.nbytes for x in (self.weight, self.bias, self.scale, *codes) if x is not None)
        return held + (0 if self.cpu is None else self.cpu.nbytes)

    @property
    def whole_bias(self) -> Tensor | None:
        """The bias [N] in float32."""
        if self.cpu is None:
            return None if self.bias is None else self.bias.float()
        biases = [part.bias for part in self.cpu.parts if part.bias is not None]
        return torch.cat(biases) if biases else None

    @property
    def memory(self) -> Tensor:
        """The tensor of this weight that GPU kernels read first: its codes, or its unquantized numbers."""
        return self.codes[0].codes if self.codes else self.weight

    @property
    def format(self) -> tuple[object, ...]:
        """The formats for which a GPU kernel must be compiled. Kernels are compiled for the sizes, too."""
        return self.weight.dtype, self.dynamic, *(part.format for part in self.codes)


def packed_in_c(weight: CpuWeight) -> PackedLinear:
    return PackedLinear(torch.empty(0, dtype=weight.dtype), None, True, weight)


def pack(weight: Tensor, bias: Tensor | None = None, *, invariant: bool, memory: Memory | None = None) -> PackedLinear:
    """Prepares a weight [N, K] and a bias [N] on their device. memory: as for pack_weight"""
    if not weight.is_cuda and c_library.available(weight.dtype):
        return packed_in_c(pack_weight([weight], bias, dtype=weight.dtype, memory=memory))
    return PackedLinear(weight, bias, invariant)


def pack_quantized(
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    invariant: bool,
    dynamic: bool = False,
    memory: Memory | None = None,
) -> PackedLinear:
    """Prepares values [N, K] (int8 or float8_e4m3fn) with scale [N] for inputs of `dtype`.

    dynamic: if true, inputs are quantized, too
    memory: as for pack_weight

    Only GPU kernels read quantized values. On a CPU, they are converted to a weight of `dtype`.
    """
    if values.is_cuda:
        return PackedLinear(values, bias, True, scale=scale, dynamic=dynamic)
    return pack(dequantize(values, scale, dtype), bias, invariant=invariant, memory=memory)


def pack_stacked(
    parts: Sequence[Tensor | Coded],
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    invariant: bool,
    memory: Memory | None = None,
    int8_inputs: bool = False,
) -> PackedLinear:
    """Prepares one weight [N, K] for inputs of `dtype`. Its rows are the rows of `parts`, one part after another.

    A part is a tensor of `dtype`, or quantized (in blocks only on a CPU). On a GPU, a mix of both is stored as one
    tensor, without quantization.
    memory, int8_inputs: as for pack_weight; only the C library has products of inputs of 8 bits
    """
    if all(not part.is_cuda for part in parts) and c_library.available(dtype):
        return packed_in_c(pack_weight(parts, bias, dtype=dtype, memory=memory, int8_inputs=int8_inputs))
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) == len(parts) and all(part.is_cuda for part in parts):
        empty = torch.empty(0, dtype=dtype, device=quantized[0].codes.device)
        return PackedLinear(empty, bias, True, codes=tuple(map(pack_codes, stack(quantized))))
    plain = [part if isinstance(part, Tensor) else part.dequantize(dtype) for part in parts]
    return pack(torch.cat(plain) if len(plain) > 1 else plain[0], bias, invariant=invariant, memory=memory)
