"""Products with a weight, gated or not: chooses which form runs."""

from torch import Tensor

from worker.ops.activation import act_and_mul
from worker.ops.launch_options import NO_OPTIONS, GpuOptions
from worker.ops.linear.packed import PackedLinear
from worker.ops.linear.reference import linear_torch
from worker.spec import Activation


def linear(
    x: Tensor,
    packed: PackedLinear,
    *,
    fp32_out: bool = False,
    split_k: bool = False,
    options: GpuOptions = NO_OPTIONS,
) -> Tensor:
    """Returns x [T, K] @ weight.T + bias, [T, N] in x's dtype, or in float32 if `fp32_out`.

    A float32 result has not been rounded to x's dtype before, except by library GEMMs. With `split_k`, the result may
    also be split-K partial sums (see worker/ops/norm/reference.py) if it is cheaper to add them later.
    """
    if x.is_cuda and packed.codes:
        from worker.ops.linear.triton_low_bit import quantized_linear_triton

        return quantized_linear_triton(
            x, packed.codes, packed.bias, fp32_out=fp32_out, split_k=split_k,
            whole_rows=packed.whole_rows, options=options,
        )  # fmt: skip
    if x.is_cuda and packed.invariant:
        from worker.ops.linear.triton import linear_triton

        return linear_triton(
            x,
            packed.weight,
            packed.bias,
            packed.scale,
            dynamic=packed.dynamic,
            fp32_out=fp32_out,
            split_k=split_k,
            whole_rows=packed.whole_rows,
            options=options,
        )
    return linear_torch(x, packed, fp32_out=fp32_out)


def gated_linear(
    x: Tensor, packed: PackedLinear, activation: Activation, *, options: GpuOptions = NO_OPTIONS
) -> Tensor:
    """Returns act_and_mul(linear(x)), [T, I], for x [T, K] and the stacked weights of gate and up, [2 I, K]."""
    if x.is_cuda and packed.codes:
        from worker.ops.linear.triton_low_bit import can_be_gated, quantized_gated_linear_triton

        if can_be_gated(packed.codes, packed.whole_rows):
            return quantized_gated_linear_triton(
                x, packed.codes[0], packed.bias, activation, whole_rows=packed.whole_rows, options=options
            )
    elif x.is_cuda and packed.invariant:
        from worker.ops.linear.triton import gated_linear_triton
        from worker.ops.linear.triton_tiles import is_single_chain

        if is_single_chain(packed.weight, packed.whole_rows):
            return gated_linear_triton(
                x, packed.weight, packed.bias, activation, packed.scale, dynamic=packed.dynamic,
                whole_rows=packed.whole_rows, options=options,
            )  # fmt: skip
    return act_and_mul(linear(x, packed, options=options), activation, options=options)
