"""Triton kernels for Mamba-2.

One program advances some columns of the state of one head through all rows of one sequence in the step. The state stays
in registers, as in delta_net.py.
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
from worker.kernels.recurrent.mamba2 import Mamba2Shape, Mamba2Weights
from worker.kernels.recurrent.recurrent_state import RecurrentState, StateSlots


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
