"""Triton kernels for the gated delta rule.

One program advances some columns of the state of one value head through all rows of one sequence in the step. The state
stays in registers. Every row has the same operations in the same order, for any number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.recurrent.reference import LENGTH_EPS, DeltaNetWeights, Mamba2Weights
from worker.ops.recurrent_state import DeltaNetShape, Mamba2Shape, RecurrentState, StateSlots


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


# Triton kernels for Mamba-2.
#
# One program advances some columns of the state of one head through all rows of one sequence in the step. The state
# stays in registers, as in the gated delta rule.


@triton.jit(do_not_specialize=["stride"])
def _scan_kernel(
    x_ptr, steps_ptr, conv_ptr, bias_ptr, decay_ptr, dt_bias_ptr, skip_ptr, tails_ptr, memories_ptr, read_slots_ptr,
    write_slots_ptr, query_start_loc_ptr, out_ptr, stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, PADDED_DIM: tl.constexpr,
    TAPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    VALUES: tl.constexpr = HEADS * HEAD_DIM
    CHANNELS: tl.constexpr = VALUES + 2 * GROUPS * STATE
    SHARED: tl.constexpr = HEADS // GROUPS
    block, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end, read, write, begins = find_sequence(seq, read_slots_ptr, write_slots_ptr, query_start_loc_ptr)
    if start == end:
        return
    n, column = tl.arange(0, BLOCK_N), block * BLOCK_P + tl.arange(0, BLOCK_P)
    in_n, in_p = n < STATE, column < HEAD_DIM
    x_channel, b_channel = head * HEAD_DIM + column, VALUES + head // SHARED * STATE + n
    c_channel = b_channel + GROUPS * STATE
    tail_ptr, new_tail_ptr = tails_ptr + read * (TAPS - 1) * CHANNELS, tails_ptr + write * (TAPS - 1) * CHANNELS
    cells = (head * STATE + n)[:, None] * PADDED_DIM + column[None, :]
    in_state = in_n[:, None] & in_p[None, :]
    size = HEADS * STATE * PADDED_DIM
    state = tl.load(memories_ptr + read * size + cells, mask=in_state & (begins == 0), other=0.0)
    rate, dt_bias, skip = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head), tl.load(skip_ptr + head)
    for row in range(start, end):
        at = row - start
        x = convolved(x_ptr, tail_ptr, conv_ptr, bias_ptr, x_channel, in_p, row, at, stride, CHANNELS, begins, TAPS)
        b = convolved(x_ptr, tail_ptr, conv_ptr, bias_ptr, b_channel, in_n, row, at, stride, CHANNELS, begins, TAPS)
        c = convolved(x_ptr, tail_ptr, conv_ptr, bias_ptr, c_channel, in_n, row, at, stride, CHANNELS, begins, TAPS)
        dt = softplus(tl.load(steps_ptr + row * HEADS + head).to(tl.float32) + dt_bias)
        state = state * tl.exp(rate * dt) + b[:, None] * (dt * x)[None, :]
        result = tl.sum(state * c[:, None], axis=0) + skip * x
        tl.store(out_ptr + row * VALUES + head * HEAD_DIM + column, result, mask=in_p)
    tl.store(memories_ptr + write * size + cells, state, mask=in_state)
    keep_tail(x_ptr, tail_ptr, new_tail_ptr, x_channel, in_p, start, end, stride, CHANNELS, begins, TAPS)
    if (block == 0) & (head % SHARED == 0):
        keep_tail(x_ptr, tail_ptr, new_tail_ptr, b_channel, in_n, start, end, stride, CHANNELS, begins, TAPS)
        keep_tail(x_ptr, tail_ptr, new_tail_ptr, c_channel, in_n, start, end, stride, CHANNELS, begins, TAPS)


@triton.jit(do_not_specialize=["stride"])
def _norm_gated_kernel(
    x_ptr, gates_ptr, weight_ptr, out_ptr, stride, eps,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiplies x by SiLU of its gate, and computes the RMS norm of the product. A program computes one group of heads
    of a row.
    """
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    at = group * SIZE + column
    x = tl.load(x_ptr + row * GROUPS * SIZE + at, mask=mask, other=0.0)
    gate = tl.load(gates_ptr + row * stride + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gated = x * silu(gate)
    out = gated * tl.rsqrt(tl.sum(gated * gated, axis=0) / SIZE + eps) * weight
    tl.store(out_ptr + row * GROUPS * SIZE + at, out.to(out_ptr.dtype.element_ty), mask=mask)


def mamba2_triton(
    projected: Tensor,
    steps: Tensor,
    weights: Mamba2Weights,
    shape: Mamba2Shape,
    state: RecurrentState,
    slots: StateSlots,
    eps: float,
) -> Tensor:
    """Computes the same as `mamba2_torch`. No sequence may read the slot that it writes.

    The memory of a slot is [heads, state_size, padded columns].
    """
    check_inputs(projected, steps, shape, shape.heads, state)
    rows, width = projected.shape
    padded = state.memory.shape[1] // (shape.heads * shape.state_size)
    mixed = torch.empty(rows, shape.values, device=projected.device)
    blocks = triton.cdiv(shape.head_dim, COLUMNS)
    _scan_kernel[(blocks, shape.heads, len(slots.read))](
        projected[:, shape.values :], steps, weights.conv, weights.conv_bias, weights.decay, weights.dt_bias,
        weights.skip, state.tail, state.memory, slots.read, slots.write, slots.query_start_loc, mixed, width,
        HEADS=shape.heads, HEAD_DIM=shape.head_dim, GROUPS=shape.groups, STATE=shape.state_size, PADDED_DIM=padded,
        TAPS=shape.taps, BLOCK_N=triton.next_power_of_2(shape.state_size), BLOCK_P=COLUMNS, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    out, size = projected.new_empty(rows, shape.values), shape.values // shape.groups
    _norm_gated_kernel[(rows, shape.groups)](
        mixed, projected, weights.norm, out, width, eps,
        GROUPS=shape.groups, SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


# Triton kernel for short_conv: one program computes some channels of all rows of one sequence in the step.
#
# It computes the rows in blocks. The result of a row does not depend on its place in a block.

ROWS, CHANNELS = 16, 64  # the sizes of a block


@triton.jit
def _inputs(x_ptr, tail_ptr, start, at, channel, mask, channels, begins, TAPS: tl.constexpr):
    """Returns the convolution's inputs b * x in fp32 for rows `at` [rows, 1] of a sequence. Negative `at`: the input is
    read from the tail.
    """
    now, before = mask & (at >= 0), mask & (at < 0) & (begins == 0)
    row_ptrs = x_ptr + (start + at) * 3 * channels + channel
    b, x = tl.load(row_ptrs, mask=now, other=0.0), tl.load(row_ptrs + 2 * channels, mask=now, other=0.0)
    old = tl.load(tail_ptr + (TAPS - 1 + at) * channels + channel, mask=before, other=0.0)
    return (b * x).to(tl.float32) + old.to(tl.float32)


@triton.jit(do_not_specialize=["channels"])
def _short_conv_kernel(
    x_ptr, conv_ptr, tails_ptr, read_slots_ptr, write_slots_ptr, query_start_loc_ptr, out_ptr, channels,
    TAPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(1)
    start, end, read, write, begins = find_sequence(seq, read_slots_ptr, write_slots_ptr, query_start_loc_ptr)
    if start == end:
        return
    size = (TAPS - 1) * channels
    tail_ptr, new_tail_ptr = tails_ptr + read * size, tails_ptr + write * size
    channel = (tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    in_row = channel < channels
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    for first in range(0, end - start, ROWS):
        at = first + tl.arange(0, ROWS)[:, None]
        mask = in_row & (at < end - start)
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        for tap in tl.static_range(TAPS):
            weight = tl.load(conv_ptr + tap * channels + channel, mask=in_row, other=0.0)
            back = at - (TAPS - 1 - tap)
            total += weight * _inputs(x_ptr, tail_ptr, start, back, channel, mask, channels, begins, TAPS)
        c = tl.load(x_ptr + (start + at) * 3 * channels + channels + channel, mask=mask, other=0.0)
        tl.store(out_ptr + (start + at) * channels + channel, c * total.to(dtype), mask=mask)
    for tap in tl.static_range(TAPS - 1):
        at = end - start - (TAPS - 1) + tap + tl.zeros((1, 1), tl.int64)
        kept = _inputs(x_ptr, tail_ptr, start, at, channel, in_row, channels, begins, TAPS)
        tl.store(new_tail_ptr + tap * channels + channel, kept.to(dtype), mask=in_row)


def short_conv_triton(
    projected: Tensor,
    weight: Tensor,
    state: RecurrentState,
    slots: StateSlots,
) -> Tensor:
    """Computes the same as `short_conv_torch`. No sequence may read the slot that it writes."""
    taps, channels = weight.shape
    assert projected.shape[1] == 3 * channels and projected.is_contiguous() and state.tail.dtype == projected.dtype
    assert state.tail.is_contiguous() and weight.is_contiguous()
    out = torch.empty(len(projected), channels, dtype=projected.dtype, device=projected.device)
    _short_conv_kernel[(triton.cdiv(channels, CHANNELS), len(slots.read))](
        projected, weight, state.tail, slots.read, slots.write, slots.query_start_loc, out, channels,
        TAPS=taps, ROWS=ROWS, CHANNELS=CHANNELS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


# Functions for the Triton kernels of recurrent layers.
#
# Every program itself computes the convolutions that it needs. A separate kernel for convolutions would have to know
# the sequence of each row.

COLUMNS = 32  # how many columns of a matrix a program advances


def check_inputs(
    projected: Tensor, gates: Tensor, shape: DeltaNetShape | Mamba2Shape, gate_width: int, state: RecurrentState
) -> None:
    """Asserts that projections have the right shapes: projected [T, sum of shape.projected], gates [T, gate_width]."""
    assert projected.shape[1] == sum(shape.projected) and projected.is_contiguous()
    assert gates.shape == (len(projected), gate_width) and gates.is_contiguous()
    assert state.tail.dtype == projected.dtype == gates.dtype


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def find_sequence(seq, read_slots_ptr, write_slots_ptr, query_start_loc_ptr):
    """Returns the first row of a sequence, the row after its last row, the slots that it reads and writes, and whether
    the sequence begins in this step. A sequence that begins has no state to read; 0 is then returned as the slot to
    read.
    """
    start, end = tl.load(query_start_loc_ptr + seq).to(tl.int64), tl.load(query_start_loc_ptr + seq + 1).to(tl.int64)
    read, write = tl.load(read_slots_ptr + seq).to(tl.int64), tl.load(write_slots_ptr + seq).to(tl.int64)
    return start, end, tl.maximum(read, 0), write, (read < 0).to(tl.int32)


@triton.jit
def convolved(
    x_ptr, tail_ptr, conv_ptr, bias_ptr, channel, mask, row, at, stride, channels, begins, TAPS: tl.constexpr
):  # fmt: skip
    """Returns SiLU of the convolution of some channels, for one row.

    row: the row's index in the step; at: its index among the rows of its sequence in this step
    bias_ptr: None if there is no bias
    tail_ptr: the sequence's last inputs before this step; begins: if true, there are none, and zeros are used instead
    """
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        now = tl.load(x_ptr + (row - back) * stride + channel, mask=mask & (at >= back), other=0.0)
        before = (at < back) & (begins == 0)
        old = tl.load(tail_ptr + (TAPS - 1 + at - back) * channels + channel, mask=mask & before, other=0.0)
        weight = tl.load(conv_ptr + tap * channels + channel, mask=mask, other=0.0)
        total += weight * (now.to(tl.float32) + old.to(tl.float32))
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=mask, other=0.0)
    return silu(total)


@triton.jit
def keep_tail(x_ptr, tail_ptr, to_ptr, channel, mask, start, end, stride, channels, begins, TAPS: tl.constexpr):
    """Writes a sequence's last inputs of some channels to the new tail. They may come from this step or from the old
    tail.
    """
    for tap in tl.static_range(TAPS - 1):
        # the input's index among the sequence's rows in this step; if negative, the input is in the old tail
        at = end - (TAPS - 1) + tap - start
        now = tl.load(x_ptr + (start + at) * stride + channel, mask=mask & (at >= 0), other=0.0)
        before = (at < 0) & (begins == 0)
        old = tl.load(tail_ptr + (TAPS - 1 + at) * channels + channel, mask=mask & before, other=0.0)
        tl.store(to_ptr + tap * channels + channel, now + old, mask=mask)
