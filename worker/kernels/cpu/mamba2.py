"""Calls the C library's Mamba-2 (csrc/mamba2.c) with torch tensors.

The memory of a slot is [heads, blocks of COLUMNS columns, state_size, COLUMNS], with zeros in missing columns.
"""

import ctypes
from ctypes import Structure, c_float, c_int, c_long, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker.kernels.cpu.delta_net import MAX_TAPS, check_slots, padded_columns
from worker.kernels.cpu.library import available, kernels

if TYPE_CHECKING:
    from worker.kernels.mamba2 import Mamba2Shape, Mamba2Weights
    from worker.kernels.recurrent_state import RecurrentState

__all__ = ["mamba2", "padded_columns"]


class Mamba2Struct(Structure):
    """struct Mamba2 of csrc/mamba2.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("conv", "conv_bias", "decay", "dt_bias", "skip", "norm", "tails", "memories")),
        *((name, c_long) for name in ("heads", "head_dim", "groups", "state_size", "taps")),
        ("eps", c_float), ("threads", c_int), ("seqs", c_long),
        *((name, c_void_p) for name in ("projected", "steps", "read_slots", "write_slots", "query_start_loc")),
        *((name, c_void_p) for name in ("mixed", "rates", "out")),
    ]  # fmt: skip


def supports(dtype: torch.dtype, shape: "Mamba2Shape") -> bool:
    """Whether the library computes layers of this shape on the CPU, for inputs of `dtype`."""
    return available(dtype) and shape.taps <= MAX_TAPS


def layer_struct(weights: "Mamba2Weights", shape: "Mamba2Shape", state: "RecurrentState", eps: float) -> Mamba2Struct:
    """Returns a struct without the fields of a step. It is valid as long as the weights and the state."""
    dtype = weights.norm.dtype
    assert weights.conv.shape == (shape.taps, shape.channels) and weights.conv_bias.shape == (shape.channels,)
    assert weights.decay.shape == weights.dt_bias.shape == weights.skip.shape == (shape.heads,)
    assert weights.norm.shape == (shape.values,) and state.tail.dtype == dtype and supports(dtype, shape)
    numbers = (weights.conv, weights.conv_bias, weights.decay, weights.dt_bias, weights.skip)
    assert all(small.dtype == torch.float32 for small in (*numbers, state.memory))
    tensors = (*numbers, weights.norm, state.tail, state.memory)
    assert all(tensor.is_contiguous() for tensor in tensors)
    return Mamba2Struct(
        *(tensor.data_ptr() for tensor in tensors),
        shape.heads, shape.head_dim, shape.groups, shape.state_size, shape.taps, eps,
    )  # fmt: skip


def scratch_floats(shape: "Mamba2Shape") -> int:
    """Returns how many numbers `mixed` and `rates` have for each row."""
    return shape.channels + 2 * shape.heads


def mamba2(
    projected: Tensor,
    steps: Tensor,
    weights: "Mamba2Weights",
    shape: "Mamba2Shape",
    state: "RecurrentState",
    read_slots: Tensor,
    write_slots: Tensor,
    query_start_loc: Tensor,
    eps: float,
) -> Tensor:
    """Computes the same as `mamba2_torch`."""
    rows, width = projected.shape
    assert width == sum(shape.projected) and steps.shape == (rows, shape.heads)
    assert projected.is_contiguous() and steps.is_contiguous()
    assert projected.dtype == steps.dtype == weights.norm.dtype
    check_slots(read_slots, write_slots, query_start_loc)
    call = layer_struct(weights, shape, state, eps)
    out = projected.new_empty(rows, shape.values)
    mixed, rates = torch.empty(rows, shape.channels), torch.empty(rows, 2, shape.heads)
    call.threads, call.seqs = torch.get_num_threads(), len(read_slots)
    call.projected, call.steps, call.out = projected.data_ptr(), steps.data_ptr(), out.data_ptr()
    call.read_slots, call.write_slots = read_slots.data_ptr(), write_slots.data_ptr()
    call.query_start_loc, call.mixed, call.rates = query_start_loc.data_ptr(), mixed.data_ptr(), rates.data_ptr()
    kernels()[projected.dtype].mamba2(ctypes.byref(call))
    return out
