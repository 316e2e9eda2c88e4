"""Calls the C library's gated delta rule (csrc/delta_net.c) with torch tensors.

The memory of a slot is [value_heads, blocks of COLUMNS columns, key_dim, COLUMNS], with zeros in missing columns.
"""

import ctypes
from ctypes import Structure, c_float, c_int, c_long, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker.kernels.cpu.library import available, kernels

if TYPE_CHECKING:
    from worker.kernels.delta_net import DeltaNetShape, DeltaNetWeights
    from worker.kernels.recurrent_state import RecurrentState

COLUMNS = 32
MAX_TAPS, MAX_KEY_DIM = 8, 256


class DeltaNetStruct(Structure):
    """struct DeltaNet of csrc/delta_net.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("conv", "decay", "dt_bias", "norm", "tails", "memories")),
        *((name, c_long) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps")),
        ("eps", c_float), ("threads", c_int), ("seqs", c_long),
        *((name, c_void_p) for name in ("projected", "gates", "read_slots", "write_slots", "query_start_loc")),
        *((name, c_void_p) for name in ("mixed", "rates", "out")),
    ]  # fmt: skip


def padded_columns(value_dim: int) -> int:
    return -(-value_dim // COLUMNS) * COLUMNS


def supports(dtype: torch.dtype, shape: "DeltaNetShape") -> bool:
    """Whether the library computes layers of this shape on the CPU, for inputs of `dtype`."""
    return available(dtype) and shape.key_dim <= MAX_KEY_DIM and shape.taps <= MAX_TAPS


def layer_struct(
    weights: "DeltaNetWeights", shape: "DeltaNetShape", state: "RecurrentState", eps: float
) -> DeltaNetStruct:
    """Returns a struct without the fields of a step. It is valid as long as the weights and the state."""
    dtype = weights.norm.dtype
    assert weights.conv.shape == (shape.taps, shape.channels) and state.tail.dtype == dtype and supports(dtype, shape)
    assert weights.decay.shape == weights.dt_bias.shape == (shape.value_heads,) and len(weights.norm) == shape.value_dim
    for small in (weights.conv, weights.decay, weights.dt_bias, state.memory):
        assert small.dtype == torch.float32 and small.is_contiguous()
    tensors = (weights.conv, weights.decay, weights.dt_bias, weights.norm, state.tail, state.memory)
    assert state.tail.is_contiguous() and weights.norm.is_contiguous()
    return DeltaNetStruct(
        *(tensor.data_ptr() for tensor in tensors),
        shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.taps, eps,
    )  # fmt: skip


def scratch_floats(shape: "DeltaNetShape") -> int:
    """Returns how many numbers `mixed` and `rates` have for each row."""
    return shape.channels + 2 * shape.value_heads


def check_slots(read_slots: Tensor, write_slots: Tensor, query_start_loc: Tensor) -> None:
    for slots in (read_slots, write_slots, query_start_loc):
        assert slots.dtype == torch.int32 and slots.is_contiguous()
    assert len(read_slots) == len(write_slots) == len(query_start_loc) - 1


def delta_net(
    projected: Tensor,
    gates: Tensor,
    weights: "DeltaNetWeights",
    shape: "DeltaNetShape",
    state: "RecurrentState",
    read_slots: Tensor,
    write_slots: Tensor,
    query_start_loc: Tensor,
    eps: float,
) -> Tensor:
    """Computes the same as `delta_net_torch`."""
    rows, width = projected.shape
    assert width == sum(shape.projected) and gates.shape == (rows, sum(shape.gates))
    assert projected.is_contiguous() and gates.is_contiguous()
    assert projected.dtype == gates.dtype == weights.norm.dtype
    check_slots(read_slots, write_slots, query_start_loc)
    call = layer_struct(weights, shape, state, eps)
    out = projected.new_empty(rows, shape.values)
    mixed, rates = torch.empty(rows, shape.channels), torch.empty(rows, 2, shape.value_heads)
    call.threads, call.seqs = torch.get_num_threads(), len(read_slots)
    call.projected, call.gates, call.out = projected.data_ptr(), gates.data_ptr(), out.data_ptr()
    call.read_slots, call.write_slots = read_slots.data_ptr(), write_slots.data_ptr()
    call.query_start_loc, call.mixed, call.rates = query_start_loc.data_ptr(), mixed.data_ptr(), rates.data_ptr()
    kernels()[projected.dtype].delta_net(ctypes.byref(call))
    return out
