"""Passes recurrent layers to the C library, and runs a layer alone, outside of the C library's loop over all layers.

The structures have the same fields, in the same order, as the structs in csrc/recurrent/recurrent.h.
"""

import ctypes
from ctypes import Structure, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.cpu.library import kernels
from worker.kernels.recurrent.delta_net import DeltaNetShape, DeltaNetWeights
from worker.kernels.recurrent.mamba2 import Mamba2Shape, Mamba2Weights
from worker.kernels.recurrent.recurrent_state import RecurrentState, StateSlots


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


@dataclass(frozen=True, slots=True)
class RecurrentC:
    """A recurrent layer without its linears, as the C library reads it."""

    function: str  # a field of library.Kernels
    struct: Structure
    row_floats: int  # how much scratch memory each row of a step needs, in floats
    referenced: tuple[object, ...]  # the owners of the memory that the struct points to


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
