"""Calls the C library's short convolution (csrc/short_conv.c) with torch tensors."""

import ctypes
from ctypes import Structure, c_int, c_long, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker.kernels.cpu.delta_net import MAX_TAPS, check_slots
from worker.kernels.cpu.library import available, kernels

if TYPE_CHECKING:
    from worker.kernels.recurrent_state import RecurrentState


class ShortConvStruct(Structure):
    """struct ShortConv of csrc/short_conv.h."""

    _fields_ = [
        ("conv", c_void_p), ("tails", c_void_p), ("channels", c_long), ("taps", c_long), ("threads", c_int),
        ("seqs", c_long),
        *((name, c_void_p) for name in ("projected", "read_slots", "write_slots", "query_start_loc", "inputs", "out")),
    ]  # fmt: skip


def supports(dtype: torch.dtype, taps: int) -> bool:
    """Whether the library computes layers with so many taps on the CPU, for inputs of `dtype`."""
    return available(dtype) and taps <= MAX_TAPS


def layer_struct(weight: Tensor, state: "RecurrentState") -> ShortConvStruct:
    """Returns a struct without the fields of a step. It is valid as long as the weight and the state."""
    taps, channels = weight.shape
    assert weight.dtype == torch.float32 and weight.is_contiguous() and supports(state.tail.dtype, taps)
    assert state.tail.shape[1:] == (taps - 1, channels) and state.tail.is_contiguous()
    return ShortConvStruct(weight.data_ptr(), state.tail.data_ptr(), channels, taps)


def scratch_floats(channels: int) -> int:
    """Returns how many numbers `inputs` has for each row, in floats."""
    return channels


def short_conv(
    projected: Tensor,
    weight: Tensor,
    state: "RecurrentState",
    read_slots: Tensor,
    write_slots: Tensor,
    query_start_loc: Tensor,
) -> Tensor:
    """Computes the same as `short_conv_torch`."""
    rows, channels = len(projected), weight.shape[1]
    assert projected.shape[1] == 3 * channels and projected.is_contiguous() and projected.dtype == state.tail.dtype
    check_slots(read_slots, write_slots, query_start_loc)
    call = layer_struct(weight, state)
    inputs, out = projected.new_empty(rows, channels), projected.new_empty(rows, channels)
    call.threads, call.seqs, call.projected = torch.get_num_threads(), len(read_slots), projected.data_ptr()
    call.read_slots, call.write_slots = read_slots.data_ptr(), write_slots.data_ptr()
    call.query_start_loc, call.inputs, call.out = query_start_loc.data_ptr(), inputs.data_ptr(), out.data_ptr()
    kernels()[projected.dtype].short_conv(ctypes.byref(call))
    return out
