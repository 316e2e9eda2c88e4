"""Calls the C library's short convolution (csrc/recurrent/short_conv.c) with torch tensors."""

from ctypes import Structure, c_long, c_void_p

import torch
from torch import Tensor

from worker.kernels.cpu.library import available
from worker.kernels.cpu.limits import MAX_TAPS
from worker.kernels.cpu.recurrent.recurrent_c import RecurrentC, run
from worker.kernels.recurrent.recurrent_state import RecurrentState, StateSlots


class ShortConvStruct(Structure):
    """struct ShortConv of csrc/recurrent/short_conv.c."""

    _fields_ = [("conv", c_void_p), ("tails", c_void_p), ("channels", c_long), ("taps", c_long)]


def supports(dtype: torch.dtype, taps: int) -> bool:
    """Returns whether the library can compute convolutions over `taps` tokens for inputs of `dtype`."""
    return available(dtype) and taps <= MAX_TAPS


def layer_in_c(weight: Tensor, state: RecurrentState) -> RecurrentC:
    taps, channels = weight.shape
    assert weight.dtype == torch.float32 and weight.is_contiguous() and supports(state.tail.dtype, taps)
    assert state.tail.shape[1:] == (taps - 1, channels) and state.tail.is_contiguous()
    struct = ShortConvStruct(weight.data_ptr(), state.tail.data_ptr(), channels, taps)
    return RecurrentC("short_conv", struct, channels, (weight, state))


def short_conv(projected: Tensor, weight: Tensor, state: RecurrentState, slots: StateSlots) -> Tensor:
    """Computes the same as `short_conv_torch`."""
    channels = weight.shape[1]
    assert projected.shape[1] == 3 * channels and projected.dtype == state.tail.dtype
    return run(layer_in_c(weight, state), projected, None, slots, channels)
