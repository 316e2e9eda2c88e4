"""Triton kernels for the gated delta rule.

One program advances some columns of the state of one value head through all rows of one sequence in the step. The state
stays in registers. Every row has the same operations in the same order, for any number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu.recurrent.recurrent import (
    COLUMNS,
    check_inputs,
    convolved,
    find_sequence,
    keep_tail,
    silu,
    softplus,
)
from worker.kernels.recurrent.delta_net import LENGTH_EPS, DeltaNetShape, DeltaNetWeights
from worker.kernels.recurrent.recurrent_state import RecurrentState, StateSlots


@triton.jit(do_not_specialize=["stride"])
def _advance_kernel(
    x_ptr, gates_ptr, conv_ptr, decay_ptr, dt_bias_ptr, tails_ptr, memories_ptr, read_slots_ptr, write_slots_ptr,
    query_start_loc_ptr, out_ptr, stride, length_eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, TAPS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    block, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end, read, write, begins = find_sequence(seq, read_slots_ptr, write_slots_ptr, query_start_loc_ptr)
    if start == end:
        return
    key, column = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = key < KEY_DIM, column < VALUE_DIM
    query_channel = head // SHARED * KEY_DIM + key
    key_channel, value_channel = KEYS + query_channel, 2 * KEYS + head * VALUE_DIM + column
    tail_ptr, new_tail_ptr = tails_ptr + read * (TAPS - 1) * CHANNELS, tails_ptr + write * (TAPS - 1) * CHANNELS
    cells = (head * KEY_DIM + key)[:, None] * PADDED_DIM + column[None, :]
    in_state = in_key[:, None] & in_value[None, :]
    size = VALUE_HEADS * KEY_DIM * PADDED_DIM
    state = tl.load(memories_ptr + read * size + cells, mask=in_state & (begins == 0), other=0.0)
    rate, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)
    for row in range(start, end):
        at = row - start
        q = convolved(x_ptr, tail_ptr, conv_ptr, None, query_channel, in_key, row, at, stride, CHANNELS, begins, TAPS)
        k = convolved(x_ptr, tail_ptr, conv_ptr, None, key_channel, in_key, row, at, stride, CHANNELS, begins, TAPS)
        v = convolved(x_ptr, tail_ptr, conv_ptr, None, value_channel, in_value, row, at, stride, CHANNELS, begins, TAPS)
        q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + length_eps) / tl.sqrt(KEY_DIM * 1.0))
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + length_eps)
        gates = gates_ptr + row * 2 * VALUE_HEADS + head
        beta = tl.sigmoid(tl.load(gates).to(tl.float32))
        a = tl.load(gates + VALUE_HEADS).to(tl.float32) + dt_bias
        state = state * tl.exp(rate * softplus(a))
        delta = (v - tl.sum(state * k[:, None], axis=0)) * beta
        state = state + k[:, None] * delta[None, :]
        result = tl.sum(state * q[:, None], axis=0)
        tl.store(out_ptr + row * VALUES + head * VALUE_DIM + column, result, mask=in_value)
    tl.store(memories_ptr + write * size + cells, state, mask=in_state)
    keep_tail(x_ptr, tail_ptr, new_tail_ptr, value_channel, in_value, start, end, stride, CHANNELS, begins, TAPS)
    if (block == 0) & (head % SHARED == 0):
        keep_tail(x_ptr, tail_ptr, new_tail_ptr, query_channel, in_key, start, end, stride, CHANNELS, begins, TAPS)
        keep_tail(x_ptr, tail_ptr, new_tail_ptr, key_channel, in_key, start, end, stride, CHANNELS, begins, TAPS)


@triton.jit(do_not_specialize=["stride"])
def _gated_norm_kernel(
    x_ptr, gates_ptr, weight_ptr, out_ptr, stride, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the RMS norm of x, and multiplies it by SiLU of the gate of x. A program computes one head of a row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    x = tl.load(x_ptr + (row * HEADS + head) * SIZE + column, mask=mask, other=0.0)
    gate = tl.load(gates_ptr + row * stride + head * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight
    out = normed * silu(gate)
    tl.store(out_ptr + (row * HEADS + head) * SIZE + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def delta_net_triton(
    projected: Tensor,
    gates: Tensor,
    weights: DeltaNetWeights,
    shape: DeltaNetShape,
    state: RecurrentState,
    slots: StateSlots,
    eps: float,
) -> Tensor:
    """Computes the same as `delta_net_torch`. No sequence may read the slot that it writes.

    The memory of a slot is [value_heads, key_dim, padded columns].
    """
    check_inputs(projected, gates, shape, sum(shape.gates), state)
    rows, width = projected.shape
    padded = state.memory.shape[1] // (shape.value_heads * shape.key_dim)
    mixed = torch.empty(rows, shape.values, device=projected.device)
    blocks = triton.cdiv(shape.value_dim, COLUMNS)
    _advance_kernel[(blocks, shape.value_heads, len(slots.read))](
        projected, gates, weights.conv, weights.decay, weights.dt_bias, state.tail, state.memory, slots.read,
        slots.write, slots.query_start_loc, mixed, width, LENGTH_EPS,
        KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads, KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim,
        PADDED_DIM=padded, TAPS=shape.taps, BLOCK_K=triton.next_power_of_2(shape.key_dim), BLOCK_V=COLUMNS,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    out = projected.new_empty(rows, shape.values)
    _gated_norm_kernel[(rows, shape.value_heads)](
        mixed, projected[:, shape.channels :], weights.norm, out, width, eps,
        HEADS=shape.value_heads, SIZE=shape.value_dim, BLOCK=triton.next_power_of_2(shape.value_dim), num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
