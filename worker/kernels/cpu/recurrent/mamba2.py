"""Calls the C library's Mamba-2 (csrc/recurrent/mamba2.c) with torch tensors.

The memory of a slot is [heads, blocks of COLUMNS columns, state_size, COLUMNS]. Columns of padding are zero.
"""

from ctypes import Structure, c_long, c_void_p

import torch
from torch import Tensor

from worker.kernels.cpu.library import available
from worker.kernels.cpu.limits import MAX_TAPS
from worker.kernels.cpu.recurrent.recurrent_c import (
    MatrixLayerStruct,
    RecurrentC,
    matrix_layer,
    matrix_layer_floats,
    run,
)
from worker.kernels.recurrent.mamba2 import Mamba2Shape, Mamba2Weights
from worker.kernels.recurrent.recurrent_state import RecurrentState, StateSlots


class Mamba2Struct(Structure):
    """struct Mamba2 of csrc/recurrent/mamba2.c."""

    _fields_ = [("layer", MatrixLayerStruct), ("conv_bias", c_void_p), ("skip", c_void_p), ("groups", c_long)]


def supports(dtype: torch.dtype, shape: Mamba2Shape) -> bool:
    """Returns whether the library can compute layers of this shape for inputs of `dtype`."""
    return available(dtype) and shape.taps <= MAX_TAPS


def layer_in_c(weights: Mamba2Weights, shape: Mamba2Shape, state: RecurrentState, eps: float) -> RecurrentC:
    assert supports(weights.norm.dtype, shape) and weights.norm.shape == (shape.values,)
    assert weights.conv_bias.shape == (shape.channels,) and weights.skip.shape == (shape.heads,)
    assert all(one.dtype == torch.float32 and one.is_contiguous() for one in (weights.conv_bias, weights.skip))
    layer = matrix_layer(weights, shape, state, shape.values, eps)
    struct = Mamba2Struct(layer, weights.conv_bias.data_ptr(), weights.skip.data_ptr(), shape.groups)
    return RecurrentC("mamba2", struct, matrix_layer_floats(shape), (weights, state))


def mamba2(
    projected: Tensor,
    steps: Tensor,
    weights: Mamba2Weights,
    shape: Mamba2Shape,
    state: RecurrentState,
    slots: StateSlots,
    eps: float,
) -> Tensor:
    """Computes the same as `mamba2_torch`."""
    assert projected.shape[1] == sum(shape.projected) and steps.shape == (len(projected), shape.heads)
    assert projected.dtype == weights.norm.dtype
    return run(layer_in_c(weights, shape, state, eps), projected, steps, slots, shape.values)
