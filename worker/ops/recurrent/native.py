"""Passes recurrent layers to the C library, and runs a layer alone, outside of the C library's loop over all layers.

The structures have the same fields, in the same order, as the structs in csrc/recurrent.h.
"""

import ctypes
from ctypes import Structure, c_float, c_int, c_long, c_void_p

import torch
from torch import Tensor

from worker.ops.native import MAX_TAPS, available, kernels
from worker.ops.recurrent.reference import DeltaNetWeights, Mamba2Weights
from worker.ops.recurrent_state import DeltaNetShape, Mamba2Shape, RecurrentC, RecurrentState, StateSlots


class MatrixLayerStruct(Structure):
    """Struct MatrixLayer: the fields that Gated DeltaNet and Mamba-2, whose states are matrices, have in common."""

    _fields_ = [
        *((name, c_void_p) for name in ("conv", "decay", "dt_bias", "norm", "tails", "memories")),
        *((name, c_long) for name in ("heads", "keys", "columns", "taps", "channels", "first", "width")),
        ("eps", c_float),
    ]  # fmt: skip


class _Step(Structure):
    """Struct RecurrentStep."""

    _fields_ = [
        ("threads", c_int), ("seqs", c_long),
        *((name, c_void_p) for name in ("projected", "gates", "read_slots", "write_slots", "query_start_loc")),
        ("scratch", c_void_p), ("out", c_void_p),
    ]  # fmt: skip


def matrix_layer(
    weights: DeltaNetWeights | Mamba2Weights, shape: DeltaNetShape | Mamba2Shape, state: RecurrentState,
    first: int, eps: float,
) -> MatrixLayerStruct:  # fmt: skip
    """Returns the struct of a layer whose state is matrices.

    first: the index of the convolution's first input in a row of `projected`
    """
    tensors = (weights.conv, weights.decay, weights.dt_bias, weights.norm, state.tail, state.memory)
    numbers, heads = (weights.conv, weights.decay, weights.dt_bias, state.memory), shape.matrices[0]
    assert all(tensor.is_contiguous() for tensor in tensors) and all(one.dtype == torch.float32 for one in numbers)
    assert weights.conv.shape == (shape.taps, shape.channels) and state.tail.dtype == weights.norm.dtype
    assert weights.decay.shape == weights.dt_bias.shape == (heads,)
    return MatrixLayerStruct(
        *(tensor.data_ptr() for tensor in tensors),
        *shape.matrices, shape.taps, shape.channels, first, sum(shape.projected), eps,
    )  # fmt: skip


def matrix_layer_floats(shape: DeltaNetShape | Mamba2Shape) -> int:
    """Returns how many floats of scratch memory a layer whose state is matrices needs for each row of a step."""
    return shape.channels + 2 * shape.matrices[0]


def check_slots(slots: StateSlots) -> None:
    for numbers in (slots.read, slots.write, slots.query_start_loc):
        assert numbers.dtype == torch.int32 and numbers.is_contiguous()
    assert len(slots.read) == len(slots.write) == len(slots.query_start_loc) - 1


def run(layer: RecurrentC, projected: Tensor, gates: Tensor | None, slots: StateSlots, width: int) -> Tensor:
    """Computes one layer for a step. Returns the layer's output [T, width] in the dtype of `projected`."""
    assert projected.is_contiguous()
    assert gates is None or (gates.is_contiguous() and gates.dtype == projected.dtype)
    check_slots(slots)
    out, scratch = projected.new_empty(len(projected), width), torch.empty(len(projected), layer.row_floats)
    step = _Step(
        torch.get_num_threads(), len(slots.read), projected.data_ptr(), None if gates is None else gates.data_ptr(),
        slots.read.data_ptr(), slots.write.data_ptr(), slots.query_start_loc.data_ptr(), scratch.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    getattr(kernels()[projected.dtype], layer.function)(ctypes.byref(layer.struct), ctypes.byref(step))
    return out


# Calls the C library's gated delta rule (csrc/delta_net.c) with torch tensors.
#
# The memory of a slot is [value_heads, blocks of COLUMNS columns, key_dim, COLUMNS]. Columns of padding are zero.


class DeltaNetStruct(Structure):
    """struct DeltaNet of csrc/delta_net.c."""

    _fields_ = [("layer", MatrixLayerStruct), ("key_heads", c_long)]


def supports_delta_net(dtype: torch.dtype, shape: DeltaNetShape) -> bool:
    """Returns whether the library can compute layers of this shape for inputs of `dtype`."""
    return available(dtype) and shape.taps <= MAX_TAPS


def delta_net_in_c(weights: DeltaNetWeights, shape: DeltaNetShape, state: RecurrentState, eps: float) -> RecurrentC:
    assert supports_delta_net(weights.norm.dtype, shape) and weights.norm.shape == (shape.value_dim,)
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
    return run(delta_net_in_c(weights, shape, state, eps), projected, gates, slots, shape.values)


# Calls the C library's Mamba-2 (csrc/mamba2.c) with torch tensors.
#
# The memory of a slot is [heads, blocks of COLUMNS columns, state_size, COLUMNS]. Columns of padding are zero.


class Mamba2Struct(Structure):
    """struct Mamba2 of csrc/mamba2.c."""

    _fields_ = [("layer", MatrixLayerStruct), ("conv_bias", c_void_p), ("skip", c_void_p), ("groups", c_long)]


def supports_mamba2(dtype: torch.dtype, shape: Mamba2Shape) -> bool:
    """Returns whether the library can compute layers of this shape for inputs of `dtype`."""
    return available(dtype) and shape.taps <= MAX_TAPS


def mamba2_in_c(weights: Mamba2Weights, shape: Mamba2Shape, state: RecurrentState, eps: float) -> RecurrentC:
    assert supports_mamba2(weights.norm.dtype, shape) and weights.norm.shape == (shape.values,)
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
    return run(mamba2_in_c(weights, shape, state, eps), projected, steps, slots, shape.values)


# Calls the C library's short convolution (csrc/short_conv.c) with torch tensors.


class ShortConvStruct(Structure):
    """struct ShortConv of csrc/short_conv.c."""

    _fields_ = [("conv", c_void_p), ("tails", c_void_p), ("channels", c_long), ("taps", c_long)]


def supports_short_conv(dtype: torch.dtype, taps: int) -> bool:
    """Returns whether the library can compute convolutions over `taps` tokens for inputs of `dtype`."""
    return available(dtype) and taps <= MAX_TAPS


def short_conv_in_c(weight: Tensor, state: RecurrentState) -> RecurrentC:
    taps, channels = weight.shape
    assert weight.dtype == torch.float32 and weight.is_contiguous() and supports_short_conv(state.tail.dtype, taps)
    assert state.tail.shape[1:] == (taps - 1, channels) and state.tail.is_contiguous()
    struct = ShortConvStruct(weight.data_ptr(), state.tail.data_ptr(), channels, taps)
    return RecurrentC("short_conv", struct, channels, (weight, state))


def short_conv(projected: Tensor, weight: Tensor, state: RecurrentState, slots: StateSlots) -> Tensor:
    """Computes the same as `short_conv_torch`."""
    channels = weight.shape[1]
    assert projected.shape[1] == 3 * channels and projected.dtype == state.tail.dtype
    return run(short_conv_in_c(weight, state), projected, None, slots, channels)
