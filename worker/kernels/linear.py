"""Matrix product with a weight that is prepared once and read every step.

`invariant` asks that a row's result never depends on the other rows: library GEMMs choose their K order by the row
count, so it needs a product whose order of addition only the weight's shape decides. A quantized weight (quantize.py)
always gets one.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.kernels.act_and_mul import Activation, act_and_mul, act_and_mul_torch
from worker.kernels.cpu import bindings
from worker.kernels.cpu.bindings import CpuWeight
from worker.kernels.quantize import dequantize, linear_quantized_torch


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight as `linear` wants it."""

    weight: Tensor  # [N, K]; empty where `cpu` holds it; int8 or float8_e4m3fn where there is a `scale`
    bias: Tensor | None  # [N]
    invariant: bool
    cpu: CpuWeight | None = None  # the same in the CPU library's order
    scale: Tensor | None = None  # [N] float32
    dynamic: bool = False  # of its inputs each row is quantized to its format, too


def pack(weight: Tensor, bias: Tensor | None = None, *, invariant: bool) -> PackedLinear:
    """Prepare weight [N, K] (and bias [N]) on the device it lives on."""
    if not weight.is_cuda and bindings.available(weight.dtype):
        return PackedLinear(weight.new_empty(0), None, True, bindings.pack_linear(weight, bias))
    return PackedLinear(weight, bias, invariant)


def pack_quantized(
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    invariant: bool,
    dynamic: bool = False,
) -> PackedLinear:
    """Prepare values [N, K] (int8 or float8_e4m3fn) with scale [N] for inputs of `dtype`, which if `dynamic` are
    quantized, too.

    Where no kernel reads such values, which is anywhere but on a GPU, they become a weight of `dtype`.
    """
    if values.is_cuda:
        return PackedLinear(values, bias, True, scale=scale, dynamic=dynamic)
    return pack(dequantize(values, scale, dtype), bias, invariant=invariant)


def linear(x: Tensor, packed: PackedLinear, *, fp32_out: bool = False, split_k: bool = False) -> Tensor:
    """x [T, K] @ weight.T + bias -> [T, N], in x's dtype, or float32 if `fp32_out` (unrounded, library GEMMs apart).

    With `split_k` it may also be split-K partial sums (see split_k.py), where adding them later is cheaper.
    """
    if x.is_cuda and packed.invariant:
        from worker.kernels.gpu.linear import linear_triton

        return linear_triton(
            x,
            packed.weight,
            packed.bias,
            packed.scale,
            dynamic=packed.dynamic,
            fp32_out=fp32_out,
            split_k=split_k,
        )
    return linear_torch(x, packed, fp32_out=fp32_out)


def linear_torch(x: Tensor, packed: PackedLinear, *, fp32_out: bool = False, split_k: bool = False) -> Tensor:
    """The same without Triton, never as terms. A weight that only the C library holds is multiplied there."""
    if packed.cpu is not None:
        return bindings.linear(x, packed.cpu, out_dtype=torch.float32 if fp32_out else None)
    if packed.scale is not None:
        y = linear_quantized_torch(x, packed.weight, packed.scale, packed.bias, dynamic=packed.dynamic)
    else:
        y = F.linear(x, packed.weight, packed.bias)
    return y.float() if fp32_out else y


def gated_linear(x: Tensor, packed: PackedLinear, activation: Activation) -> Tensor:
    """gate(linear(x)) for x [T, K] and the weights of gate and up, one above the other, [2 I, K] -> [T, I]."""
    if x.is_cuda and packed.invariant:
        from worker.kernels.gpu.linear import gated_linear_triton
        from worker.kernels.gpu.tiles import is_single_chain

        if is_single_chain(packed.weight):
            return gated_linear_triton(x, packed.weight, packed.bias, activation, packed.scale, dynamic=packed.dynamic)
    return act_and_mul(linear(x, packed), activation)


def gated_linear_torch(x: Tensor, packed: PackedLinear, activation: Activation) -> Tensor:
    return act_and_mul_torch(linear_torch(x, packed), activation)
