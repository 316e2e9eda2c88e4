"""Calls the C library's gated delta rule (csrc/recurrent/delta_net.c) with torch tensors.

The memory of a slot is [value_heads, blocks of COLUMNS columns, key_dim, COLUMNS]. Columns of padding are zero.
"""

from ctypes import Structure, c_long

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
from worker.kernels.recurrent.delta_net import DeltaNetShape, DeltaNetWeights
from worker.kernels.recurrent.recurrent_state import RecurrentState, StateSlots


class DeltaNetStruct(Structure):
    """struct DeltaNet of csrc/recurrent/delta_net.c."""

    _fields_ = [("layer", MatrixLayerStruct), ("key_heads", c_long)]


def supports(dtype: torch.dtype, shape: DeltaNetShape) -> bool:
    """Returns whether the library can compute layers of this shape for inputs of `dtype`."""
    return available(dtype) and shape.taps <= MAX_TAPS


def layer_in_c(weights: DeltaNetWeights, shape: DeltaNetShape, state: RecurrentState, eps: float) -> RecurrentC:
    assert supports(weights.norm.dtype, shape) and weights.norm.shape == (shape.value_dim,)
    struct = DeltaNetStruct(matrix_layer(weights, shape, state, 0, eps), shape.key_heads)
    return RecurrentC("delta_net", struct, matrix_layer_floats(shape), (weights, state))


def delta_net(
    projected: Tensor,
    gates: Tensor,
    weights: DeltaNetWeights,
    shape: DeltaNetShape,
    state: RecurrentState,
    slots: StateSlots,
    eps: float,
) -> Tensor:
    """Computes the same as `delta_net_torch`."""
    assert projected.shape[1] == sum(shape.projected) and gates.shape == (len(projected), sum(shape.gates))
    assert projected.dtype == weights.norm.dtype
    return run(layer_in_c(weights, shape, state, eps), projected, gates, slots, shape.values)
